"""The Plan: how a run is laid out over devices, and nothing about what it learns.

Everything that decides (specs, memory, timing, planner) produces a Plan; everything that acts
(parallelize, strategies) obeys one. This file imports neither torch nor Lightning.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

MIB = 2**20
Adapters = Literal["replicated", "sharded"]
Recomputing = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "all"]
_CHOICES: dict[str, tuple[object, ...]] = {
    "adapters": get_args(Adapters),
    "activation_checkpoint": get_args(Recomputing),
    "offload": get_args(Offload),
    "compile": (True, False),
    "defer_gradient_sync": (True, False),
    "static_graph": (True, False),
    "torch_ddp": (True, False),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How to run a training job. A Plan changes speed and memory, never what is learned.

    Raises:
        ValueError: when a field is out of range or two fields contradict each other.
    """

    dp_replicate: int = 1
    """Full copies of the model (data-parallel replicas)."""
    dp_shard: int = 1
    """Ranks that share one copy (data-parallel shards). 1 means nothing is sharded."""
    tp: int = 1
    """Ranks that share every matrix product (tensor parallel)."""
    resident_blocks: int | tuple[str, ...] = 0
    """Blocks kept whole on every rank: the last N of the model, or these names."""
    reshard_after_forward: bool | int = True
    """Free a gathered block after its forward (True), keep it for backward (False), or keep it
    sharded over this many ranks (an integer that divides ``dp_shard``)."""
    adapters: Adapters = "sharded"
    """Adapter weights: whole on every rank, or sharded with the block they sit in."""
    activation_checkpoint: Recomputing = "none"
    """Which activations are recomputed in backward instead of kept."""
    activation_checkpoint_blocks: int | None = None
    """How many blocks recompute (the first N); None means all of them."""
    offload: Offload = "none"
    """What waits in host memory between uses."""
    compile: bool = False
    """Compile each block in place with ``torch.compile``."""
    defer_gradient_sync: bool = False
    """While accumulating, reduce sharded gradients only at the last micro-batch: less traffic, but
    whole gradients are held meanwhile. Replicated plans always defer: it costs them nothing."""
    bucket_cap_mb: float | None = None
    """MiB of gradients per all-reduce of a replicated plan; None sizes it by :func:`tuned_bucket_bytes`."""
    torch_ddp: bool = False
    """Wrap a replicated module in torch's DistributedDataParallel, for its options and hooks. Otherwise
    gradients are views of flat buffers that the engine reduces without copies."""
    static_graph: bool = False
    """Tell torch's DDP, which then carries the plan out, that every step uses the same parameters in the same order."""
    prefetch: int = 1
    """How many sharded blocks are gathered ahead of the one that computes."""

    def __post_init__(self) -> None:
        for name in ("dp_replicate", "dp_shard", "tp"):
            _require_int(name, getattr(self, name), minimum=1)
        _require_int("prefetch", self.prefetch, minimum=0)
        if isinstance(self.resident_blocks, list):  # JSON has no tuples
            object.__setattr__(self, "resident_blocks", tuple(self.resident_blocks))
        if not isinstance(self.resident_blocks, tuple):
            _require_int("resident_blocks", self.resident_blocks, minimum=0)
        elif not all(isinstance(name, str) for name in self.resident_blocks):
            raise ValueError(f"resident_blocks={self.resident_blocks!r} must be a number of blocks, or their names.")
        if self.activation_checkpoint_blocks is not None:
            _require_int("activation_checkpoint_blocks", self.activation_checkpoint_blocks, minimum=0)
        for name, choices in _CHOICES.items():
            _require_choice(name, getattr(self, name), choices)
        cap = self.bucket_cap_mb
        if cap is not None and (isinstance(cap, bool) or not isinstance(cap, (int, float)) or not cap > 0):
            raise ValueError(f"bucket_cap_mb={cap!r} must be above 0 MiB, or None to have it tuned.")
        self._check_reshard()

    def _check_reshard(self) -> None:
        reshard = self.reshard_after_forward
        if isinstance(reshard, bool):
            return
        _require_int("reshard_after_forward", reshard, minimum=1)
        if self.dp_shard % reshard:
            raise ValueError(
                f"reshard_after_forward={reshard} must divide dp_shard={self.dp_shard}: it is the number of ranks "
                "that share a block between forward and backward. Use True, False or a divisor."
            )

    @property
    def world_size(self) -> int:
        """Ranks this plan needs."""
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def strategy(self) -> Literal["ddp", "fsdp2"]:
        """Which of the two engines carries the plan out."""
        return "fsdp2" if self.dp_shard > 1 or self.tp > 1 else "ddp"

    @property
    def flat_gradients(self) -> bool:
        """Whether replicas average their gradients in flat buffers rather than through torch's DDP."""
        return self.strategy == "ddp" and self.dp_replicate > 1 and not self.torch_ddp and not self.static_graph

    def require_world_size(self, world_size: int) -> None:
        """Raise unless the plan is for exactly this many ranks.

        Raises:
            ValueError: naming both numbers and the two ways out.
        """
        if self.world_size != world_size:
            raise ValueError(
                f"The plan needs {self.world_size} ranks (dp_replicate={self.dp_replicate} x dp_shard={self.dp_shard} "
                f"x tp={self.tp}) but {world_size} were launched. Re-plan for {world_size} devices, or launch "
                f"{self.world_size}."
            )

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if isinstance(self.resident_blocks, tuple):
            values["resident_blocks"] = list(self.resident_blocks)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Plan":
        """Build a Plan from :meth:`to_dict`'s output.

        Raises:
            ValueError: when a key is not a field of the Plan.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"A Plan has no field {', '.join(unknown)}. Its fields: {', '.join(known)}.")
        return cls(**values)

    def to_json(self) -> str:
        """The plan as one JSON object."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that :meth:`to_json` wrote."""
        return cls.from_dict(json.loads(text))


def tuned_bucket_bytes(trainable_bytes: int, world_size: int) -> int:
    """Bytes of gradients per all-reduce of replicas, from what is trained and the world size.

    Two pulls: a bucket should be large enough that the 2(N-1) hops of a ring all-reduce are paid by
    bandwidth, not latency (1 MiB per hop of a ring, up to 25 MiB on small worlds and 100 MiB on large
    ones), and small enough that backward still has work to hide it behind (a quarter of all gradients).
    It never exceeds the trainable bytes.
    """
    largest = (100 if world_size > 64 else 25) * MIB
    smallest = min(MIB * max(1, 2 * (world_size - 1)), largest)
    wanted = min(max(trainable_bytes // 4, smallest), largest)
    return max(1, min(wanted, trainable_bytes))


def _require_int(name: str, value: object, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name}={value!r} must be a whole number, {minimum} or more.")


def _require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")
