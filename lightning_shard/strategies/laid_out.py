"""What every layout needs: which plan is in force, and DDP's wrapper for the replicated ones."""

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_shard._compat import DDP_SYNCS_BUFFERS, DDPStrategy, LightningModule
from lightning_shard._compat.groups import keep_timeout
from lightning_shard._compat.sharded import has_compiled_parts
from lightning_shard.parallelize import Parallelized, bucket_bytes
from lightning_shard.parallelize.shard import reshard_all
from lightning_shard.plans import MIB, Plan


class LaidOutStrategy(DDPStrategy):
    """A DDPStrategy whose module has been laid out by a Plan, or will be."""

    _layout: Parallelized | None = None
    _asks_torch_ddp = False
    """Whether the user gave options that only torch's DDP carries out."""

    @property
    def plan(self) -> Plan:
        """The plan in force.

        Raises:
            RuntimeError: before the Trainer has set the strategy up.
        """
        if self._layout is None:
            raise RuntimeError(
                "The plan is known once the Trainer has set up the run: read it in or after on_fit_start."
            )
        return self._layout.plan

    @property
    def sharded(self) -> bool:
        """Whether the module in use is sharded."""
        return self._layout is not None and self._layout.sharded

    @property
    def _root(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _rest(self) -> None:
        """Have parameters be the shards that optimizers and checkpoints know, not their gathered copies."""
        if self.sharded:
            reshard_all(self._root)

    def _needs_torch_ddp(self) -> bool:
        """Whether a replicated plan must run through torch's DDP: its options or hooks were asked for, or buffers that
        training changes (batch statistics) are to be sent to all ranks before each forward, which it does.
        """
        saved = self._root.state_dict().keys()
        return self._asks_torch_ddp or any(name in saved for name, _ in self._root.named_buffers())

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        # Every rank's start has been compared and mended by now (agree_on_start): DDP need not send it all again.
        self._ddp_kwargs["init_sync"] = False
        cap_mb = bucket_bytes(model, self.plan) / MIB
        if has_compiled_parts(model):
            # The compiler cuts graphs at bucket borders and expects none below DDP's first bucket of 1 MiB.
            cap_mb = max(cap_mb, 1.0)
        self._ddp_kwargs["bucket_cap_mb"] = cap_mb
        self._ddp_kwargs["static_graph"] = self.plan.static_graph
        with self._buffers_sent_only_if_saved(model):
            return super()._setup_model(model)

    @contextmanager
    def _buffers_sent_only_if_saved(self, model: nn.Module) -> Generator[None, None, None]:
        """DDP broadcasts all buffers in every step: needless where all of them are derived constants (rotary tables)."""
        if {"broadcast_buffers", "forward_sync_buffers"} & self._ddp_kwargs.keys():
            yield
            return
        saved = model.state_dict().keys()
        self._ddp_kwargs[DDP_SYNCS_BUFFERS] = any(name in saved for name, _ in model.named_buffers())
        try:
            yield
        finally:
            del self._ddp_kwargs[DDP_SYNCS_BUFFERS]

    @override
    def _register_ddp_hooks(self) -> None:
        # Lightning drops communication hooks in silence off CUDA; gloo runs most of them, and refuses the rest itself.
        if self._ddp_comm_hook is not None and isinstance(self.model, DistributedDataParallel):
            hook = self._ddp_comm_wrapper(self._ddp_comm_hook) if self._ddp_comm_wrapper else self._ddp_comm_hook
            self.model.register_comm_hook(self._ddp_comm_state, hook)


def make_mesh(plan: Plan, device_type: str, before: DeviceMesh | None = None) -> DeviceMesh | None:
    """The devices of a sharded plan, an axis each for its replicas, shards and tensor parallelism; else None.

    ``before`` is a mesh over living groups, taken where it is the same.
    """
    if plan.strategy == "ddp":
        return None
    shape, names = [plan.dp_shard], ["dp_shard"]
    if plan.dp_replicate > 1:
        shape, names = [plan.dp_replicate, *shape], ["dp_replicate", *names]
    if plan.tp > 1:  # innermost: neighbours, so that it stays inside a node
        shape, names = [*shape, plan.tp], [*names, "tp"]
    if before is not None and (before.shape, before.mesh_dim_names) == (tuple(shape), tuple(names)):
        return before
    return keep_timeout(init_device_mesh(device_type, tuple(shape), mesh_dim_names=tuple(names)))
