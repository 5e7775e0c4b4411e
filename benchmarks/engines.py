"""Training loops to compare: raw PyTorch, ours and the peers', over the same model, data, optimizer and precision."""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.turns import Turn
from benchmarks.work import Work, build, loss_of, make_optimizer
from lightning_shard import AutoShardStrategy, FSDP2Strategy, Plan, TunedDDPStrategy
from lightning_shard.strategies.base import PlanStrategy

Engine = Callable[[Turn], None]
BARE: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
}
"""A Trainer without anything that a raw loop does not have."""
TYPES = {"32-true": None, "bf16-true": torch.bfloat16, "bf16-mixed": torch.bfloat16}


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def device_of(work: Work) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if work.device == "cuda" else torch.device("cpu")


def blocks_of(model: Any) -> list[Any]:
    """The decoder's blocks, in peft's wrapper or not."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return list(base.model.layers)


# --- raw PyTorch -------------------------------------------------------------------------------------------


def raw(work: Work, layout: str, turn: Turn) -> None:
    """A loop by hand: ``none``, ``ddp`` or ``fsdp2`` as a user would write them; ``units`` groups parameters as ours do."""
    device = device_of(work)
    model: Any = build(work).to(device)
    root = model
    if layout == "ddp":
        model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    elif layout in ("fsdp2", "units"):
        mesh = init_device_mesh(device.type, (world_size(),))
        (shard_by_hand if layout == "fsdp2" else shard_by_unit)(model, work, mesh)
    optimizer = make_optimizer(root.parameters(), work)
    turn.parts = lambda: (root, optimizer)
    cast = (
        torch.autocast(device.type, torch.bfloat16)
        if work.precision == "bf16-mixed" and layout in ("none", "ddp")
        else None
    )
    for index, tokens in enumerate(turn):
        last = index % work.accumulate == work.accumulate - 1
        waits = model.no_sync() if layout == "ddp" and not last else contextlib.nullcontext()
        if layout in ("fsdp2", "units"):
            model.set_requires_gradient_sync(last)
        with waits:
            with cast or contextlib.nullcontext():
                loss = loss_of(model, tokens)
            (loss / work.accumulate).backward()
        turn.record(loss)
        if last:
            optimizer.step()
            optimizer.zero_grad()


def shard_by_hand(model: Any, work: Work, mesh: Any) -> None:
    """Every block and the root, as torch's FSDP2 tutorial does it."""
    policy = MixedPrecisionPolicy(param_dtype=TYPES[work.precision])
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def shard_by_unit(model: Any, work: Work, mesh: Any) -> None:
    """As :func:`shard_by_hand`, with embedding and head in groups of their own, where ours puts them."""
    policy = MixedPrecisionPolicy(param_dtype=TYPES[work.precision])
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    fully_shard(base.model.embed_tokens, mesh=mesh, mp_policy=policy)
    base.model.embed_tokens.set_unshard_in_backward(False)
    fully_shard(base.lm_head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    shard_by_hand(model, work, mesh)


# --- Lightning's Trainer -------------------------------------------------------------------------------------


class Module(LightningModule):
    """The same model and loss as a LightningModule."""

    def __init__(self, work: Work, turn: Turn) -> None:
        super().__init__()
        self.work = work
        self.turn = [turn]  # in a list, so that nothing walks into it
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = build(self.work)

    def training_step(self, tokens: Tensor, _: int) -> Tensor:
        loss = loss_of(self.model, tokens)
        self.turn[0].record(loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.parameters(), self.work)


class ShardedByHand(Module):
    """What ModelParallelStrategy asks of the user: ``fully_shard`` in ``configure_model``."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = build(self.work)
            shard_by_hand(self.model, self.work, self.device_mesh["data_parallel"])


def fit(
    work: Work,
    make_strategy: Callable[[], Strategy | str],
    turn: Turn,
    *,
    module_class: type[Module] = Module,
    **trainer_options: Any,
) -> None:
    """A Trainer's ``fit`` over the loader."""
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    trainer = Trainer(
        strategy=make_strategy(),
        accelerator="cpu" if work.device == "cpu" else "gpu",
        devices=world_size() // nodes,
        num_nodes=nodes,
        precision=work.precision,
        max_epochs=1,
        accumulate_grad_batches=work.accumulate,
        **{**BARE, **trainer_options},
    )
    module = module_class(work, turn)
    turn.parts = lambda: (module, trainer.optimizers[0])
    trainer.fit(module, train_dataloaders=turn)
    if isinstance(trainer.strategy, PlanStrategy):
        turn.measured.facts["plan"] = trainer.strategy.plan.to_dict()


# --- accelerate and transformers -------------------------------------------------------------------------------


def _own_accelerate_state() -> None:
    """Accelerate keeps one state per process; engines that take turns need one each."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state = {}


def accelerate_fsdp2(work: Work, turn: Turn) -> None:
    """accelerate's FSDP2 over the same loop."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    _own_accelerate_state()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    mixed = "bf16" if work.precision == "bf16-mixed" else "no"
    accelerator = Accelerator(
        fsdp_plugin=plugin,
        cpu=work.device == "cpu",
        mixed_precision=mixed,
        gradient_accumulation_steps=work.accumulate,
    )
    os.environ.pop("ACCELERATE_USE_FSDP")  # set by the Accelerator for all that come after it
    if work.device == "cpu":  # accelerate turns to FSDP on accelerators alone; its code runs on CPU all the same
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    model = build(work)
    model, optimizer = accelerator.prepare(model, make_optimizer(model.parameters(), work))
    assert isinstance(model, FSDPModule)
    turn.parts = lambda: (model, optimizer)
    for tokens in turn:
        with accelerator.accumulate(model):
            loss = loss_of(model, tokens)
            accelerator.backward(loss)
            turn.record(loss)
            optimizer.step()
            optimizer.zero_grad()


def hf_trainer(work: Work, turn: Turn) -> None:
    """transformers' Trainer (DDP), over peft's model where adapters train."""
    from transformers import Trainer as HFTrainer
    from transformers import TrainingArguments

    _own_accelerate_state()
    model = build(work)

    class Loop(HFTrainer):
        def get_train_dataloader(self) -> Any:
            return turn

        def compute_loss(self, model: Any, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
            loss = loss_of(model, inputs["input_ids"])
            turn.record(loss)
            return loss

        def get_batch_samples(self, iterator: Any, num_batches: int, *_: Any) -> Any:
            # Labels would have it count tokens over all ranks, which the other loops do not do.
            return [{"input_ids": next(iterator)} for _ in range(num_batches)], None

    arguments = TrainingArguments(
        output_dir=os.path.join("/tmp", "benchmark-hf-trainer"),
        use_cpu=work.device == "cpu",
        per_device_train_batch_size=work.rows,
        gradient_accumulation_steps=work.accumulate,
        max_steps=len(turn) // work.accumulate,
        learning_rate=work.lr,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        optim="adamw_torch_fused" if work.fused else "adamw_torch",
        weight_decay=0.01,
        bf16=work.precision == "bf16-mixed",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        ddp_find_unused_parameters=False,
    )
    decayed = make_optimizer(model.parameters(), work)  # the same groups as everyone's
    schedule = torch.optim.lr_scheduler.LambdaLR(decayed, lambda _: 1.0)
    Loop(model=model, args=arguments, train_dataset=[0] * len(turn), optimizers=(decayed, schedule)).train()


# --- by name -------------------------------------------------------------------------------------------------


def engines(work: Work, names: list[str]) -> dict[str, Engine]:
    """The engines of some names, over the same work; ``+fused`` after a name gives it AdamW in one kernel."""
    return {name: _engine(work, name) for name in names}


def _engine(work: Work, name: str) -> Engine:
    import dataclasses

    base, _, fused = name.partition("+")
    if fused:
        work = dataclasses.replace(work, fused=True)
    n = world_size()
    made: dict[str, Callable[[], Engine]] = {
        "local": lambda: functools.partial(raw, work, "none"),
        "raw": lambda: functools.partial(raw, work, "none"),
        "raw-ddp": lambda: functools.partial(raw, work, "ddp"),
        "raw-fsdp2": lambda: functools.partial(raw, work, "fsdp2"),
        "raw-units": lambda: functools.partial(raw, work, "units"),
        "lightning": lambda: functools.partial(fit, work, lambda: "auto"),
        "lightning-ddp": lambda: functools.partial(fit, work, DDPStrategy),
        "lightning-mp": lambda: functools.partial(
            fit, work, lambda: ModelParallelStrategy(data_parallel_size=n, tensor_parallel_size=1),
            module_class=ShardedByHand,
        ),
        "accelerate-fsdp2": lambda: functools.partial(accelerate_fsdp2, work),
        "hf-trainer": lambda: functools.partial(hf_trainer, work),
        "ours": lambda: functools.partial(fit, work, lambda: AutoShardStrategy(plan=Plan(dp_replicate=n))),
        "ours-ddp": lambda: functools.partial(fit, work, TunedDDPStrategy),
        "ours-fsdp2": lambda: functools.partial(fit, work, FSDP2Strategy),
    }  # fmt: skip
    if base in made:
        return made[base]()
    return functools.partial(fit, work, lambda: AutoShardStrategy(plan=_plan(base, n)))


def _plan(name: str, world: int) -> Plan:
    """``ours-rK``: sharded with the last K blocks resident and replicated adapters; ``ours-hsdp``: pairs of ranks;
    ``ours-kept``: blocks stay gathered from the first micro-batch to the last.
    """
    if name.startswith("ours-r") and name[len("ours-r") :].isdigit():
        return Plan(dp_shard=world, resident_blocks=int(name[len("ours-r") :]), adapters="replicated")
    if name == "ours-hsdp":
        return Plan(dp_replicate=world // 2, dp_shard=2, adapters="replicated")
    if name == "ours-kept":
        return Plan(dp_shard=world, reshard_after_forward=False, adapters="replicated")
    raise ValueError(f"There is no engine {name!r}.")
