"""One engine for every plan: Lightning's hooks, as thin as they can be."""

import dataclasses
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard._compat import Precision as PrecisionPlugin
from lightning_shard._compat import Trainer, TrainerFn, fsdp_reset, fsdp_watch_loss
from lightning_shard.checkpoint.options import SaveOptions
from lightning_shard.doctor.callback import attach_doctor
from lightning_shard.parallelize import Parallelized, is_sharded, parallelize, unsynced_parameters
from lightning_shard.parallelize.shard import allocate_outside_inference_mode
from lightning_shard.plans import Plan
from lightning_shard.strategies._compat import take_over_links
from lightning_shard.strategies.checks import (
    asks_torch_ddp,
    require_known_options,
    require_manual_backward,
    require_optimizers_over_module,
    require_script,
    require_supported_precision,
    require_trainable,
    require_used,
)
from lightning_shard.strategies.meeting import Place, launcher_hosts_store, meet, open_group
from lightning_shard.strategies.peers import introduce
from lightning_shard.strategies.precision import ShardAwarePrecision, translate
from lightning_shard.strategies.state import PortableStateStrategy

DEFAULT_TIMEOUT = timedelta(minutes=30)
START_TIMEOUT = timedelta(minutes=2)
_LAID_OUT = "_lightning_shard_layout"


class PlanStrategy(PortableStateStrategy):
    """Runs any LightningModule under a Plan, replicated or sharded.

    A subclass of Lightning's DDPStrategy, so that samplers, compiled modules and other people's
    ``isinstance`` checks treat it as the data-parallel strategy it is. Subclasses say which plan.

    Args:
        forward_methods: methods of the LightningModule besides the steps that compute with its own weights.
        weights_only: how a checkpoint is unpickled; None leaves it to torch (nothing but tensors and plain
            values). ``Trainer.fit(weights_only=...)`` does not reach a strategy that restores after setup.
        timeout: of a collective.
        start_timeout: how long the ranks wait for each other before they name those that are missing.
        doctor: examine the run before it trains and after its first steps (:class:`lightning_shard.doctor.Doctor`).
        ddp: the fields of :class:`SaveOptions`, and anything else that Lightning's DDPStrategy or torch's
            DistributedDataParallel takes.
    """

    def __init__(
        self,
        *,
        forward_methods: tuple[str, ...] = (),
        weights_only: bool | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        start_timeout: timedelta = START_TIMEOUT,
        doctor: bool = True,
        **ddp: Any,
    ) -> None:
        save_options = SaveOptions.take_from(ddp)
        require_known_options(type(self).__name__, ddp)
        self._asks_torch_ddp = asks_torch_ddp(ddp)
        ddp.setdefault("gradient_as_bucket_view", True)
        ddp.setdefault("find_unused_parameters", False)
        super().__init__(timeout=timeout, **ddp)
        self._forward_methods = forward_methods
        self._weights_only = weights_only
        self._start_timeout = start_timeout
        self._doctor = doctor
        self._save_options = save_options
        self._mesh: DeviceMesh | None = None
        self._synced_once = False
        """Whether a backward of this fit went through the strategy."""

    _device_memory: int | None = None
    """Bytes that one process may use, where the user said so."""

    # --- which plan ---------------------------------------------------------------------------------

    def choose_plan(self, trainer: Trainer) -> Plan:
        """The plan for this run; called once the real module is known, on all ranks."""
        raise NotImplementedError

    # --- Lightning's set-up hooks ----------------------------------------------------------------------

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        tp = self._layout.plan.tp if self._layout is not None else 1
        return {"num_replicas": self.world_size // tp, "rank": self.global_rank // tp}

    @property  # type: ignore[explicit-override]  # @override does not reach the setter
    def precision_plugin(self) -> PrecisionPlugin:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: PrecisionPlugin | None) -> None:
        # The connector overwrites the plugin of a strategy that was given by name: translate whatever comes.
        self._precision_plugin = None if plugin is None else translate(plugin)

    @override
    def _configure_launcher(self) -> None:
        num_ranks = self.num_nodes * self.num_processes
        if num_ranks == 1:
            return  # nothing to launch, so it works in a notebook too
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            require_script(num_ranks)
        super()._configure_launcher()

    @override
    def setup_distributed(self) -> None:
        if self.num_nodes * self.num_processes == 1:
            self.set_world_ranks()  # one device: no process group, no collectives
            return
        if not dist.is_initialized():
            self._meet()
        super().setup_distributed()

    def _meet(self) -> None:
        """Find the other ranks, make sure that they belong to this run, and make the process group."""
        self.set_world_ranks()
        environment = self.cluster_environment
        assert environment is not None
        place = Place(
            address=environment.main_address,
            port=environment.main_port,
            timeout_s=self._start_timeout.total_seconds(),
            hosted=launcher_hosts_store(),
        )
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place.address, str(place.port)  # as Lightning does
        store = meet(introduce(self, self.wishes(), self._device_memory), place)
        backend = self._get_process_group_backend()
        open_group(store, self.global_rank, self.world_size, backend, self.root_device, self._timeout)

    def wishes(self) -> dict[str, str]:
        """What the user asked for, in words that must be the same on every rank."""
        plan = self.fixed_plan()
        asked = {"strategy": type(self).__name__, "precision": self._shard_precision.meaning.name}
        return asked if plan is None else {**asked, "plan": plan.to_json()}

    @override
    def _get_process_group_backend(self) -> str:
        plan = self.fixed_plan()
        if self._process_group_backend is None and plan is not None and plan.offload != "none":
            # Offloaded gradients are clipped where they wait: on the host, which NCCL does not serve.
            return "gloo" if self.root_device.type == "cpu" else "cpu:gloo,cuda:nccl"
        return super()._get_process_group_backend()

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # On the host: the plan, and with it what may live on the device, is not known yet.
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self._layout = self._lay_out(trainer)
        self._forget_progress()
        if fitting:
            self.watch_signals(trainer)
            take_over_links(trainer, self.link_checkpoint)
        self._mixed_casts_follow_plan()
        if fitting:
            self._setup_training(trainer)
            if self._doctor:
                attach_doctor(trainer)
        elif self.sharded:
            allocate_outside_inference_mode(self.model)
        self.setup_precision_plugin()

    def _setup_training(self, trainer: Trainer) -> None:
        assert isinstance(self.model, nn.Module)
        require_trainable(self.model)
        self._rest()
        if not self.sharded and self.world_size > 1 and not self.plan.flat_gradients:
            self.configure_ddp()
        self._reset_optimizers_and_schedulers()
        self.setup_optimizers(trainer)
        require_optimizers_over_module(self.optimizers, self._root)
        self._synced_once = False
        if self._model_averaging_period is not None:
            self._enable_model_averaging()

    def _lay_out(self, trainer: Trainer) -> Parallelized:
        """Apply the plan to the module, or take over the layout that it already has."""
        root, precision = self._root, self._shard_precision.meaning
        before: Parallelized | None = root.__dict__.get(_LAID_OUT)
        if before is not None and before.sharded and is_sharded(root):
            self._require_same_layout(before)
            return before
        plan = self.choose_plan(trainer)
        plan.require_world_size(self.world_size)
        if plan.flat_gradients and self._needs_torch_ddp():
            plan = dataclasses.replace(plan, torch_ddp=True)
        require_supported_precision(plan, precision)
        layout = parallelize(
            root,
            plan,
            precision=precision,
            device=self.root_device,
            mesh=self._make_mesh(plan),
            seed=self.broadcast(torch.initial_seed()),
            before=before,
            forward_methods=self._forward_methods,
        )
        self.take_layout(layout)
        return layout

    def take_layout(self, layout: Parallelized) -> None:
        """From now on the module is laid out like this."""
        self._layout = self._root.__dict__[_LAID_OUT] = layout
        self._synced_once = False

    def _require_same_layout(self, before: Parallelized) -> None:
        wanted = self.fixed_plan()
        if before.plan.world_size != self.world_size or (wanted is not None and wanted != before.plan):
            raise RuntimeError(
                f"This module was already sharded for another plan ({before.plan.to_json()}). A sharded module "
                "cannot be laid out anew: build a new one, and load a checkpoint of this one into it."
            )

    def fixed_plan(self) -> Plan | None:
        """The plan the user demanded, where there is one."""
        return None

    def _make_mesh(self, plan: Plan) -> DeviceMesh | None:
        if plan.strategy == "ddp":
            return None
        shape, names = [plan.dp_shard], ["dp_shard"]
        if plan.dp_replicate > 1:
            shape, names = [plan.dp_replicate, *shape], ["dp_replicate", *names]
        if plan.tp > 1:  # innermost: neighbours, so that it stays inside a node
            shape, names = [*shape, plan.tp], [*names, "tp"]
        self._mesh = init_device_mesh(self.root_device.type, tuple(shape), mesh_dim_names=tuple(names))
        return self._mesh

    def _mixed_casts_follow_plan(self) -> None:
        if hasattr(self.precision_plugin, "policy_casts"):
            self.precision_plugin.policy_casts = self.sharded

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._require_synced()

    def _require_synced(self) -> None:
        self._rest()
        assert self._layout is not None
        names = unsynced_parameters(self._layout)
        if names:
            raise RuntimeError(
                f"{len(names)} trainable parameters were added after the module was sharded and no gradient reduction "
                f"covers them, the first is {names[0]!r}: every rank would train its own. Add layers and adapters in "
                "__init__ or configure_model."
            )

    # --- the step ------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step_scope():
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step_scope():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step_scope():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step_scope():
            return super().predict_step(*args, **kwargs)

    def _step_scope(self) -> Any:
        return self._layout.root_cast() if self._layout is not None and self._layout.root_cast else nullcontext()

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._layout is not None and self._layout.replicated:
            self._layout.replicated.before_backward(closure_loss)
        if isinstance(self.model, FSDPModule) and not self._root.automatic_optimization:
            fsdp_watch_loss(self.model, closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self._synced_once = True
        ddp = self.model
        if (
            isinstance(ddp, DistributedDataParallel)
            and ddp.require_backward_grad_sync
            and self._root.automatic_optimization
        ):
            require_used(ddp)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if not self._root.automatic_optimization and self.world_size > 1:
            require_manual_backward(optimizer, seen=self._synced_once)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        if self._layout is not None and (self._layout.sharded or self._layout.replicated):
            with self._layout.between_micro_batches():
                yield
        elif self._must_sync_first():
            yield
        else:
            with super().block_backward_sync():
                yield

    def _must_sync_first(self) -> bool:
        # DDP with a static graph learns its buckets in the first backward, which must therefore reduce. The sum is the
        # same: the mean of this micro-batch joins the gradients that the last one averages.
        return isinstance(self.model, DistributedDataParallel) and self.model.static_graph and not self._synced_once

    # --- the end -------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        if isinstance(self.model, FSDPModule):
            fsdp_reset(self.model)
        if self._layout is not None and self._layout.replicated:
            self._layout.replicated.reset()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        if not self.sharded:
            super().teardown()
            return
        # Shards stay where they are: the base class would move them, and their optimizer state, to the host.
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # --- small things --------------------------------------------------------------------------------

    @property
    def _shard_precision(self) -> ShardAwarePrecision:
        plugin = self.precision_plugin
        return plugin if isinstance(plugin, ShardAwarePrecision) else translate(plugin)
