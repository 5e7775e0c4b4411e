"""Everything a memory term looks at, worked out once per plan."""

import dataclasses
from dataclasses import dataclass

from lightning_shard.activations import BlockActivations, LossActivations, block_activations, loss_activations
from lightning_shard.hardware import Cluster
from lightning_shard.memory.groups import Group, find_groups, is_autocast
from lightning_shard.plans import Plan
from lightning_shard.specs import ModelSpec, Optimizer, TrainSpec, dtype_bytes, find_optimizer
from lightning_shard.specs.split import full_name, rank_architecture, rank_unit, split_vocabulary, splits_head


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One run of equal blocks: its group and its activations."""

    group: Group
    activations: BlockActivations
    recomputing: int
    """How many of the run recompute their activations in backward."""
    recomputing_bytes: int
    """What one of those keeps: its input, and under the selective policy its expensive results."""
    unneeded_bytes: int = 0
    """What the run's first block does not keep because its input needs no gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """A model (adapter injected, dtypes as stored), a training, a plan and where it runs.

    Under tensor parallelism groups, activations and the architecture are those of one rank's part.
    """

    model: ModelSpec
    train: TrainSpec
    plan: Plan
    cluster: Cluster
    groups: tuple[Group, ...]
    blocks: tuple[Block, ...]
    loss: LossActivations
    optimizer: Optimizer
    master_bytes: int
    """Bytes of an element of what trains."""
    compute_bytes: int
    reduce_bytes: int

    @property
    def sharded(self) -> bool:
        """Whether FSDP holds the weights; over one shard (tensor parallelism alone) it gathers by a local copy."""
        return self.plan.strategy == "fsdp2"

    @property
    def offloaded(self) -> bool:
        """Whether shards, their gradients and the optimizer's state wait in host memory."""
        return self.sharded and self.plan.offload == "all"

    @property
    def updates_on_host(self) -> bool:
        """Whether the optimizer's state waits, and is read, in host memory."""
        return self.offloaded or self.plan.offload == "optimizer"

    @property
    def buckets(self) -> bool:
        """Whether replicas hold gradients in buffers that are reduced: torch's DDP buckets, or flat ones."""
        return not self.sharded and self.plan.dp_replicate > 1

    @property
    def torch_ddp(self) -> bool:
        """Whether those buffers are DDP's."""
        return self.buckets and not self.plan.flat_gradients

    @property
    def defers(self) -> bool:
        """Whether whole gradients wait for the last micro-batch before they are reduced."""
        return self.sharded and self.plan.defer_gradient_sync and self.train.accumulate > 1

    @property
    def casts(self) -> bool:
        """Whether what trains is cast to the compute dtype for each use."""
        return self.compute_bytes != self.master_bytes

    @property
    def waits(self) -> bool:
        """Whether a group's weight gradients stay until its backward is through: sharded, or behind a cast."""
        return self.sharded or self.casts

    @property
    def tied_bytes(self) -> int:
        """Bytes of an element of a tied table's gradients while they wait for their sum: under autocast the look-up is
        FP32, and so is what the head's cast passes back.
        """
        return self.master_bytes if uses_autocast(self.train, self.plan) else self.compute_bytes

    @property
    def tied_numel(self) -> int:
        """Trained elements, on one rank, of an embedding that is the head as well."""
        tied = {name for pair in self.model.tied for name in pair}
        return sum(
            tensor.numel
            for unit in self.model.units
            if unit.kind == "embedding"
            for tensor in rank_unit(self.model, unit, self.plan.tp).tensors
            if tensor.trainable and full_name(unit, tensor) in tied
        )

    def total(self, field: str, *kinds: str) -> int:
        """Sum of one of a group's figures over all repetitions, of some kinds or of all."""
        return sum(g.count * int(getattr(g, field)) for g in self.groups if not kinds or g.kind in kinds)

    def one(self, field: str, *kinds: str) -> int:
        """The largest of a group's figures, among some kinds."""
        return max((int(getattr(g, field)) for g in self.groups if g.kind in kinds), default=0)

    @property
    def splits_embedding(self) -> bool:
        """Whether tensor-parallel ranks hold a part of the embedding each."""
        return bool(split_vocabulary(self.model, self.plan.tp))

    @property
    def top(self) -> Block | None:
        """The last block: backward meets it first."""
        return self.blocks[-1] if self.blocks else None

    @property
    def before_last(self) -> bool:
        """Whether the fullest of the first blocks' backwards is the last but one, which prefetches the first block's
        weights and still has its activations, rather than the first block's own, which has one more gradient.
        """
        if not (self.sharded and self.plan.dp_shard > 1 and self.model.num_blocks > 1 and self.bottom):
            return False
        kept = self.bottom.recomputing_bytes if self.bottom.recomputing else self.bottom.activations.kept_bytes
        ahead = self.plan.prefetch * self.one("gathered_bytes", "block")
        return ahead + kept >= self.master_bytes * self.one("trained_numel", "block")

    @property
    def bottom(self) -> Block | None:
        """The first block."""
        return self.blocks[0] if self.blocks else None


def make_situation(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: Cluster) -> Situation:
    """Inject the adapter, apply the storage rule and weigh the groups."""
    precision = train.precision_row
    if train.adapter is not None and model.adapter is None:
        model = model.with_adapter(train.adapter)
    model = model.with_dtypes(precision)
    groups = find_groups(model, precision, plan)
    if plan.tp > 1 and model.architecture is not None:
        model = dataclasses.replace(model, architecture=rank_architecture(model.architecture, plan.tp))
    return Situation(
        model=model,
        train=train,
        plan=plan,
        cluster=cluster,
        groups=groups,
        blocks=_blocks(model, train, plan, groups),
        loss=loss_activations(model, train, plan.tp if splits_head(model, plan.tp) else 1),
        optimizer=find_optimizer(train.optimizer),
        master_bytes=dtype_bytes(precision.master_dtype),
        compute_bytes=dtype_bytes(precision.compute_dtype or precision.master_dtype),
        reduce_bytes=dtype_bytes(precision.reduce_dtype)
        if precision.compute_dtype
        else dtype_bytes(precision.master_dtype),
    )


def uses_autocast(train: TrainSpec, plan: Plan) -> bool:
    """Whether a replicated plan computes under ``torch.autocast``: precisions that leave storage alone."""
    return is_autocast(train.precision_row, plan)


def _blocks(model: ModelSpec, train: TrainSpec, plan: Plan, groups: tuple[Group, ...]) -> tuple[Block, ...]:
    left = 0
    if plan.activation_checkpoint != "none":
        wanted = plan.activation_checkpoint_blocks
        left = model.num_blocks if wanted is None else min(wanted, model.num_blocks)
    blocks: list[Block] = []
    for group in (group for group in groups if group.kind == "block"):
        recomputing = min(left, group.count)
        left -= recomputing
        autocast = uses_autocast(train, plan)
        activations = block_activations(model, group.unit, train, autocast=autocast, compiled=plan.compile)
        first = not blocks and not input_needs_gradient(model) and not recomputing
        blocks.append(
            Block(
                group=group,
                activations=activations,
                recomputing=recomputing,
                recomputing_bytes=activations.input_bytes
                + (activations.selective_bytes if plan.activation_checkpoint == "selective" else 0),
                unneeded_bytes=activations.input_norm_bytes if first else 0,
            )
        )
    return tuple(blocks)


def input_needs_gradient(model: ModelSpec) -> bool:
    """Whether what the first block reads is computed from something that trains."""
    return any(tensor.trainable for unit, tensor in model.tensors() if unit.kind == "embedding")
