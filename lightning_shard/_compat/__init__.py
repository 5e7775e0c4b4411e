"""Every private torch or Lightning name, here and in the files beside, and the choice of the Lightning namespace.

``lightning.pytorch`` and ``pytorch_lightning`` are separate packages with separate classes. A process
uses one of them: the one that is imported, ``lightning.pytorch`` where both or neither are.
Each private name carries the reason it is needed and when it can go.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "DDP_SYNCS_BUFFERS",
    "NAMESPACE",
    "AllGather",
    "Callback",
    "DDPStrategy",
    "DispatchMode",
    "DoublePrecision",
    "FakeTensor",
    "HalfPrecision",
    "LightningModule",
    "MixedPrecision",
    "Precision",
    "ReduceScatter",
    "Trainer",
    "TrainerFn",
    "all_gather_single",
    "at_end_of_backward",
    "compile_whole_blocks",
    "ddp_reduced",
    "evaluation_loaders",
    "fake_process_group",
    "fake_tensor_mode",
    "forget_sharding",
    "fsdp_chunking",
    "fsdp_gather_async",
    "fsdp_reduce_unused",
    "fsdp_reset",
    "fsdp_root_init",
    "fsdp_transfers",
    "fsdp_watch_loss",
    "in_backward",
    "is_fake",
    "is_peft_wrapper",
    "isolate_rng",
    "mesh_arithmetic",
    "outside_modes",
    "reduce_scatter_single",
    "rank_zero_info",
    "run_micro_batch",
    "restart_loading",
    "sharding_arithmetic",
    "train_loaders",
]

NAMESPACE = (
    "pytorch_lightning"
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    else "lightning.pytorch"
)


all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gather equal shards into one tensor: renamed in torch 2.13, where the old name warns. Goes when the floor is there."""

reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Sum one tensor over the ranks and keep a share: renamed in torch 2.13, where the old name warns. Goes when the floor is
there."""

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
else:
    # What FSDPModule's set_custom_all_gather and set_custom_reduce_scatter take; torch exports the methods and not the
    # classes. Can go when it does.
    AllGather = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_api").AllGather
    ReduceScatter = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_api").ReduceScatter

DDP_SYNCS_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers"
)
"""DDP's switch for sending buffers in every forward: renamed in torch 2.13, where the old name warns. Goes when the
floor is there."""


def _lightning(module: str) -> Any:
    return importlib.import_module(f"{NAMESPACE}.{module}")


if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import rank_zero_info
    from lightning.pytorch.utilities.seed import isolate_rng
else:
    Callback = importlib.import_module(NAMESPACE).Callback
    LightningModule = importlib.import_module(NAMESPACE).LightningModule
    Trainer = importlib.import_module(NAMESPACE).Trainer
    DoublePrecision = _lightning("plugins.precision").DoublePrecision
    HalfPrecision = _lightning("plugins.precision").HalfPrecision
    MixedPrecision = _lightning("plugins.precision").MixedPrecision
    Precision = _lightning("plugins.precision").Precision
    DDPStrategy = _lightning("strategies").DDPStrategy
    TrainerFn = _lightning("trainer.states").TrainerFn
    rank_zero_info = _lightning("utilities").rank_zero_info
    isolate_rng = _lightning("utilities.seed").isolate_rng


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward in progress ends, before it returns to its caller.

    Gradients that travel while backward runs must be in before any hook sees them. Private because torch
    offers no public way to be called at that moment; can go when it does.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def compile_whole_blocks() -> None:
    """Stop the compiler from cutting graphs at DDP's bucket borders.

    Blocks are compiled one by one, each smaller than a bucket; the splitter expects a graph of the whole model and
    fails on ours. Can go when ``torch.compile`` takes this as an argument.
    """
    torch._dynamo.config.optimize_ddp = False  # type: ignore[attr-defined]


def run_micro_batch(trainer: "Trainer", optimizer: Any, batch_idx: int, kwargs: Any) -> None:
    """Forward and backward of a micro-batch that no optimizer step follows, as Lightning's loop does it.

    The loop decides by its own counters whether a step follows, so one that is done again must be told. Can go when
    the loop takes that as an argument.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    with trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]  # of parallel strategies
        loop._make_closure(kwargs, optimizer, batch_idx)()


def ddp_reduced(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters a DDP wrapper was made for; it averages gradients of those that trained then. Not public."""
    return list(ddp._module_parameters)


def fsdp_gather_async(root: FSDPModule) -> None:
    """Have gathers return at once and be waited for where they are needed.

    On the host, which has no streams, a gather blocks otherwise, whatever is prefetched. Private because torch's public
    switch is per call (``unshard(async_op=True)``), not for the gathers FSDP makes by itself; can go when it is.
    """
    root._set_unshard_async_op(True)


def fsdp_root_init(root: FSDPModule) -> None:
    """Make ``root`` the FSDP root now rather than at its first forward.

    FSDP2 takes whichever module runs first for the root, and a block that runs before the root (a user
    who calls ``self.model.generate`` in ``on_fit_start``) would lock the real root out. Private because
    there is no public way to name the root; can go when torch has one.
    """
    root._get_fsdp_state()._lazy_init()


def fsdp_reduce_unused(root: nn.Module) -> None:
    """Reduce a parameter that some rank did not use as zero there, so that all ranks reduce the same tensors.

    Without it FSDP2 pairs the gradients of different parameters when ranks use different ones. Public from torch 2.13;
    goes when the floor is there.
    """
    for module in root.modules():
        switch: Callable[[bool], None] | None = getattr(module, "set_reduce_scatter_unused_params", None)
        if isinstance(module, FSDPModule) and switch is not None:
            switch(True)


def fsdp_watch_loss(root: FSDPModule, loss: torch.Tensor) -> None:
    """Have the root's gradients reduced at the end of the backward that starts from ``loss``.

    FSDP2 learns of a backward from the outputs of the root's forward. With manual optimization the
    backward runs before ``training_step`` returns, so the loss itself must tell. Can go when
    ``FSDPModule`` has a public pre-backward registration.
    """
    root._get_fsdp_state()._register_pre_backward_hook(loss)


def fsdp_reset(root: FSDPModule) -> None:
    """Put FSDP back to rest after an exception in forward or backward (public from torch 2.13)."""
    reset: Callable[[], None] | None = getattr(root, "reset_iter_state", None)
    if reset is not None:
        reset()


def train_loaders(trainer: "Trainer") -> Any:
    """The training data loaders before Lightning has set them up (a loader, or a collection of them).

    The plan is made in ``Strategy.setup``, before the fit loop loads its data; the loop's source is the
    one place that knows a loader passed to ``fit``, a datamodule and a module's own hook alike. Can go
    when ``Trainer`` offers the loaders before the run.
    """
    source = trainer.fit_loop._data_source
    return source.dataloader() if source.instance is not None and source.is_defined() else None


def evaluation_loaders(trainer: "Trainer") -> Any:
    """The same for a validate, test or predict run that comes before any fit."""
    loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
    source = loop._data_source
    return source.dataloader() if source.instance is not None and source.is_defined() else None


def restart_loading(trainer: "Trainer") -> None:
    """Begin this epoch's training data anew, after its order has been changed.

    The iterator is made before the first hook that sees the loaders, and its workers may have read ahead. Can go when
    a callback can wrap the loaders before they are read.
    """
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is not None:
        iter(fetcher)


def is_peft_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` stands in for one of the user's layers (a LoRA layer, a ``modules_to_save`` copy)."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return False
    other = sys.modules["peft.utils.other"]
    wrappers = (tuners.BaseTunerLayer, other.AuxiliaryTrainingWrapper)
    return isinstance(module, wrappers)


# --- simulation: torch offers a step on fake tensors and a fake process group in private modules only ------------


def fake_tensor_mode() -> Any:
    """A mode in which every new tensor has a shape and no memory.

    Private until torch documents FakeTensorMode; can go then. Tensors made outside are taken for fakes.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


FakeTensor: Any = importlib.import_module("torch._subclasses.fake_tensor").FakeTensor


def is_fake(value: object) -> bool:
    """Whether ``value`` is a tensor without memory, made under :func:`fake_tensor_mode`."""
    return isinstance(value, FakeTensor)


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """This process is rank 0 of a default group whose collectives do nothing; afterwards all is as before.

    A real default group is set aside meanwhile and not touched. The backend registers itself when torch's own
    test module is imported, and torch has no public way to exchange the default group; can go when it does both.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    c10d = dist.distributed_c10d
    world: Any = c10d._world
    real, before, count, hook = world.default_pg, set(world.pg_names), world.group_count, sys.excepthook
    method = c10d._default_pg_init_method
    c10d._update_default_pg(None)
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        yield
    finally:
        made = [group for group in world.pg_names if group not in before]
        c10d._update_default_pg(real)
        for group in made:
            dist.destroy_process_group(group)
        world.group_count, sys.excepthook = count, hook  # the hook marks every later error with a rank
        c10d._default_pg_init_method = method


def forget_sharding() -> None:
    """Empty DTensor's memory of how operators shard: its entries hold the mesh they were worked out on.

    A later mesh of the same shape would be served the simulated one, whose groups are gone. Can go when the
    memory does not outlive a mesh's groups.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
else:
    # Underscored, though torch's own debugging modes and its notes on extending use it; can go when it is public.
    DispatchMode = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread (torch has no public question for it)."""
    return bool(torch._C._current_graph_task_id() != -1)


def fsdp_transfers() -> dict[str, tuple[Any, str]]:
    """Where FSDP2 allocates what it gathers and reduces: owner and attribute, to tell those bytes from others.

    Can go when FSDP2 reports its memory by itself (torch 2.13 has only a tracker that also counts the
    optimizer's shape arithmetic).
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    return {
        "gather": (_fsdp_param_group, "foreach_all_gather"),
        "copy_out": (_fsdp_param_group, "foreach_all_gather_copy_out"),
        "gathered": (_fsdp_param.FSDPParam, "init_all_gather_outputs"),
        "reduce": (_fsdp_param_group, "foreach_reduce"),
        "defer": (_fsdp_param.FSDPParam, "to_accumulated_grad_if_needed"),
    }


def sharding_arithmetic() -> tuple[Any, str]:
    """Where DTensor works out result shapes by running operators on whole, unsharded shapes.

    Under fake tensors that looks like memory. Can go when DTensor does it outside the modes in force.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return ShardingPropagator, "_propagate_tensor_meta_non_cached"


def fsdp_chunking() -> tuple[tuple[Any, str], tuple[Any, str]]:
    """Where FSDP2 cuts and joins tensors in as many chunks as there are ranks: owner and attribute of its own
    chunking, and of the torch it uses to transfer.

    With a thousand ranks that is most of a simulation's time. Can go when it cuts out only the chunk it keeps.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param

    return (_fsdp_param, "_chunk_with_empty"), (_fsdp_collectives, "torch")


def mesh_arithmetic() -> tuple[tuple[Any, str], ...]:
    """Where ranks are looked up or arranged as tensors, whose values a fake tensor does not have: this rank's
    place in a mesh, and the smaller mesh of ``reshard_after_forward=n``.

    Can go when meshes keep their ranks as numbers.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard import _fully_shard

    return (DeviceMesh, "_compute_coordinates_from_mesh"), (_fully_shard, "_get_post_forward_mesh_info")


def outside_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, run without the dispatch modes in force (torch has a public way for functions of its own only)."""
    from torch.utils._python_dispatch import _disable_current_modes

    def outside(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            return function(*args, **kwargs)

    return outside
