"""One engine for every plan: Lightning's hooks, as thin as they can be."""

import dataclasses
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_shard._compat import Precision as PrecisionPlugin
from lightning_shard._compat import Trainer, TrainerFn, fsdp_reset
from lightning_shard._compat.sharded import compare_sharded_in_finetuning
from lightning_shard._compat.trainer import take_over_links
from lightning_shard.checkpoint.options import SaveOptions
from lightning_shard.doctor.callback import attach_doctor
from lightning_shard.parallelize import Parallelized, is_sharded, parallelize, unsynced_parameters
from lightning_shard.parallelize.host_update import HostUpdate, require_host_update
from lightning_shard.parallelize.shard import allocate_outside_inference_mode
from lightning_shard.plans import Plan
from lightning_shard.strategies.advice import add_advice
from lightning_shard.strategies.averaging import follow_layout
from lightning_shard.strategies.batch_sizes import SizeSearchStrategy
from lightning_shard.strategies.checks import (
    asks_torch_ddp,
    require_known_options,
    require_masters,
    require_methods,
    require_names,
    require_optimizers_over_module,
    require_script,
    require_trainable,
)
from lightning_shard.strategies.laid_out import make_mesh
from lightning_shard.strategies.meeting import Place, launcher_hosts_store, meet, open_group
from lightning_shard.strategies.peers import introduce
from lightning_shard.strategies.precision import MasterMixedPrecision, ShardAwarePrecision, translate
from lightning_shard.strategies.steps import StepStrategy

DEFAULT_TIMEOUT = timedelta(minutes=30)
START_TIMEOUT = timedelta(minutes=2)
_LAID_OUT = "_lightning_shard_layout"

log = logging.getLogger(__name__)


class PlanStrategy(SizeSearchStrategy, StepStrategy):
    """Runs any LightningModule under a Plan, replicated or sharded.

    A subclass of Lightning's DDPStrategy, so that samplers, compiled modules and other people's
    ``isinstance`` checks treat it as the data-parallel strategy it is. Subclasses say which plan.

    Weights start alike on all ranks; random numbers drawn in training (dropout) differ between ranks with different
    data, also after ``seed_everything``. A sampler that must draw alike everywhere needs a generator of its own.

    Args:
        forward_methods: methods of the LightningModule besides the steps that compute with its own weights.
        weights_only: how a checkpoint is unpickled; None leaves it to torch (nothing but tensors and plain
            values). ``Trainer.fit(weights_only=...)`` does not reach a strategy that restores after setup.
        timeout: of a collective.
        start_timeout: how long the ranks wait for each other before they name those that are missing.
        doctor: examine the run before it trains and after its first steps (:class:`lightning_shard.doctor.Doctor`).
        norms_in_fp32: keep norms' weights in FP32 and compute in it under every precision; whole on every rank.
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
        norms_in_fp32: bool = False,
        **ddp: Any,
    ) -> None:
        save_options = SaveOptions.take_from(ddp)
        require_known_options(type(self).__name__, ddp)
        self._asks_torch_ddp = asks_torch_ddp(ddp)
        ddp = {"gradient_as_bucket_view": True, "find_unused_parameters": False, **ddp}
        super().__init__(timeout=timeout, **ddp)
        self._forward_methods = require_names(forward_methods)
        self._weights_only = weights_only
        self._start_timeout = start_timeout
        self._doctor = doctor
        self._norms_in_fp32 = norms_in_fp32
        self._save_options = save_options
        self._watched: list[nn.Parameter] = []
        self._trained: list[bool] = []
        self._seeded_with: int | None = None

    _device_memory: int | None = None
    """Bytes that one process may use, where the user said so."""

    def choose_plan(self, trainer: Trainer) -> Plan:
        """The plan for this run; called once the real module is known, on all ranks."""
        raise NotImplementedError

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
        precision = self._shard_precision.meaning.name + ", norms in FP32" * self._norms_in_fp32
        asked = {"strategy": type(self).__name__, "precision": precision}
        return asked if plan is None else {**asked, "plan": plan.to_json()}

    @override
    def _get_process_group_backend(self) -> str:
        if self._process_group_backend is None and self.offload_wish() != "none":
            # Offloaded gradients are clipped, and state is saved, where they wait: on the host, which NCCL does not serve.
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
        self.take_layout(self._lay_out(trainer))
        self._forget_progress()
        if fitting:
            self.watch_signals(trainer)
            take_over_links(trainer, self.link_checkpoint)
        self._mixed_casts_follow_plan()
        self._randomise_by_rank()
        if fitting:
            self._setup_training(trainer)
            if self._doctor:
                attach_doctor(trainer)
        elif self.sharded:
            allocate_outside_inference_mode(self.model)
        self.setup_precision_plugin()

    def _randomise_by_rank(self) -> None:
        """Ranks with different data draw different numbers (dropout), also where all were seeded alike.

        Rank 0 goes on with what it has. The start does not depend on it: that is seeded by names.
        """
        data_rank, seed = self.distributed_sampler_kwargs["rank"], torch.initial_seed()
        if data_rank and seed != self._seeded_with:
            self._seeded_with = (seed + data_rank * 0x9E3779B97F4A7C15) % 2**63  # far from its neighbours' seeds
            torch.manual_seed(self._seeded_with)

    def _setup_training(self, trainer: Trainer) -> None:
        assert isinstance(self.model, nn.Module)
        require_trainable(self.model)
        self._rest()
        self._wrap_replicas()
        self._reset_optimizers_and_schedulers()
        self.setup_optimizers(trainer)
        require_optimizers_over_module(self.optimizers, self._root)
        if self.plan.offload == "optimizer":
            require_host_update(self.optimizers)
        self._note_what_trains()
        if self._gradients is not None:
            self._gradients.refresh()
        if self.sharded:
            compare_sharded_in_finetuning()
        follow_layout(getattr(trainer, "callbacks", ()), self._root, self._rest, folders=self._writes_folders)
        if self._model_averaging_period is not None:
            self._enable_model_averaging()

    def _lay_out(self, trainer: Trainer) -> Parallelized:
        """Apply the plan to the module, or take over the layout that it already has."""
        root = self._root
        before: Parallelized | None = root.__dict__.get(_LAID_OUT)
        if before is not None and before.sharded and is_sharded(root):
            self._require_same_layout(before)
            return before
        require_methods(root, self._forward_methods)
        plan = self.choose_plan(trainer)
        plan.require_world_size(self.world_size)
        if plan.flat_gradients and self._needs_torch_ddp():
            plan = dataclasses.replace(plan, torch_ddp=True)
        return self._parallelize(plan, before)

    def _parallelize(
        self, plan: Plan, before: Parallelized | None, mesh_before: DeviceMesh | None = None
    ) -> Parallelized:
        return parallelize(
            self._root,
            plan,
            precision=dataclasses.replace(self._shard_precision.meaning, norms_in_fp32=self._norms_in_fp32),
            device=self.root_device,
            mesh=make_mesh(plan, self.root_device.type, mesh_before),
            seed=self.broadcast(torch.initial_seed()),
            before=before,
            mesh_before=mesh_before,
            forward_methods=self._forward_methods,
        )

    @override
    def lay_out_anew(self, plan: Plan) -> DeviceMesh | None:
        before = self._layout
        assert before is not None
        mesh_before = make_mesh(before.plan, self.root_device.type)  # anew: the groups of its own mesh may be gone
        layout = self._parallelize(plan, before, mesh_before)
        self.model = self._root
        self.take_layout(layout)
        self._note_what_trains()
        self._wrap_replicas()
        if self.sharded:
            compare_sharded_in_finetuning()
        return mesh_before

    def lay_out_again(self) -> None:
        """The same plan, once the ranks have met again."""
        if self._root.trainer.state.fn == TrainerFn.FITTING:
            self.lay_out_anew(self.plan)
        else:
            self.take_layout(self._parallelize(self.plan, self._layout))
            self.model = self._root

    def _wrap_replicas(self) -> None:
        """Put a replicated module into torch's DDP where the engine's flat gradients do not serve it."""
        if not self.sharded and self.world_size > 1 and not self.plan.flat_gradients:
            self.configure_ddp()

    def take_layout(self, layout: Parallelized) -> None:
        """From now on the module is laid out like this."""
        self._layout = self._root.__dict__[_LAID_OUT] = layout
        self._synced_once = False
        self._shard_precision.host_update = HostUpdate() if layout.plan.offload == "optimizer" else None
        self._watch_ranks()

    def _note_what_trains(self) -> None:
        self._watched = list(self._root.parameters())
        self._trained = self._what_trains()

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

    def offload_wish(self) -> str:
        """What the user demanded to wait in host memory; the plan itself is not known when the ranks meet."""
        plan = self.fixed_plan()
        return "none" if plan is None else plan.offload

    def _mixed_casts_follow_plan(self) -> None:
        if isinstance(self.precision_plugin, MasterMixedPrecision):
            self.precision_plugin.follow(sharded=self.sharded)

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
                f"{len(names)} trainable parameters were added after the module was sharded, or unfrozen where the plan "
                f"keeps them whole, and no gradient reduction covers them, the first is {names[0]!r}: every rank would "
                "train its own. Add layers and adapters in __init__ or configure_model; unfreeze before training, or "
                "without resident_blocks."
            )

    # --- what trains may change between batches (BackboneFinetuning) -----------------------------------

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        trained = self._what_trains()
        if trained != self._trained:
            self._trained = trained
            self._follow_what_trains()

    def _what_trains(self) -> list[bool]:
        return [p.requires_grad for p in self._watched]

    def _follow_what_trains(self) -> None:
        """Masters, casts and reductions for what trains now, or an error where that cannot be had in mid-run."""
        assert self._layout is not None
        if self._layout.sharded:
            self._require_synced()
            if self._gradients is not None:
                self._gradients.refresh()
            require_masters(self._root, self._shard_precision.meaning)
            return
        self.lay_out_anew(self._layout.plan)

    # --- the end -------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self.sharded:
            add_advice(exception)
        super().on_exception(exception)  # first: the other ranks wait to hear of it
        try:
            self.forget_step()
        except RuntimeError as error:  # it waits for gathers, and one of them may be what failed
            log.warning("The module is left in the middle of a step; build a new one to train again. (%s)", error)

    def forget_step(self) -> None:
        """Forget gathers and reductions of a step that was broken off."""
        if self._layout is not None and self._layout.replicated:
            self._layout.replicated.reset()
        if isinstance(self.model, FSDPModule):
            fsdp_reset(self.model)

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        if not self.sharded and not (module and any(p.is_meta for p in module.parameters())):
            super().teardown()
            return
        # Shards stay where they are: the base class would move them, and their optimizer state, to the host. It would
        # move what a failed set-up left on meta too, whose error would then hide the first.
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
