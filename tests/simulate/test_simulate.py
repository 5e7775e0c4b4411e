"""One call simulates a plan: what it counts on a tiny Llama, worked out by hand."""

import dataclasses
import json
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.llama import make_llama
from torch import nn

from lightning_shard.plans import Plan
from lightning_shard.simulate import Simulation, run, simulate
from lightning_shard.specs import AdapterSpec, TrainSpec

VOCABULARY = 256
TRAIN = TrainSpec(micro_batch_size=2, seq_len=16)
BLOCKS = 3
LORA = AdapterSpec(r=4)


def tiny() -> nn.Module:
    """Large enough a vocabulary that embedding and head are units of their own."""
    return make_llama(vocab_size=VOCABULARY)


def num_parameters(*, trained: bool, adapter: bool) -> int:
    """Of the tiny Llama of :mod:`helpers.llama`: 3 blocks of width 32, ffn 64, 4 heads of 8, 2 KV heads."""
    linears = [(32, 32), (16, 32), (16, 32), (32, 32), (64, 32), (64, 32), (32, 64)]
    base = BLOCKS * (sum(a * b for a, b in linears) + 2 * 32) + 2 * VOCABULARY * 32 + 32
    lora = BLOCKS * sum(4 * (a + b) for a, b in linears)
    return (lora if adapter else base) if trained else base


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("plan", [Plan(), Plan(dp_replicate=4), Plan(dp_shard=4), Plan(dp_shard=2, dp_replicate=2)])
def test_states_follow_what_trains(plan: Plan, adapter: AdapterSpec | None) -> None:
    """FP32 masters 4 bytes, AdamW's moments 8, frozen weights 2 in bf16; cut by the shards (all sizes divide)."""
    result = simulate(tiny, TrainSpec(seq_len=16, adapter=adapter), plan)
    kinds = result.moments[-1].kinds
    trained = num_parameters(trained=True, adapter=adapter is not None) // plan.dp_shard
    num_tensors = BLOCKS * (14 if adapter is not None else 9) + 3
    assert 4 * trained <= kinds["trained_weights"] <= 4 * trained + 512 * num_tensors  # each is rounded up
    assert kinds["optimizer_state"] == 2 * kinds["trained_weights"]
    if adapter is not None:
        frozen = 2 * num_parameters(trained=False, adapter=True) // plan.dp_shard
        assert frozen <= kinds["frozen_weights"] <= frozen + 512 * (BLOCKS * 9 + 3)


def test_fsdp2_gathers_each_block_twice_and_the_rest_once() -> None:
    """Units: 3 blocks, embedding, head, root. Backward gathers the blocks again; the embedding's gradient does not
    need it, head and root were kept. Every unit reduces once.
    """
    result = simulate(tiny, TRAIN, Plan(dp_shard=2))
    assert result.count("all_gather") == BLOCKS + 3 + BLOCKS
    assert result.count("reduce_scatter") == BLOCKS + 3
    assert result.count("all_reduce") == 0


def test_kept_blocks_are_gathered_once() -> None:
    result = simulate(tiny, TRAIN, Plan(dp_shard=2, reshard_after_forward=False))
    assert result.count("all_gather") == BLOCKS + 3


def test_replicas_of_shards_reduce_among_themselves() -> None:
    result = simulate(tiny, TRAIN, Plan(dp_shard=2, dp_replicate=2))
    assert result.count("all_reduce") == BLOCKS + 3


def test_a_lora_unit_without_trainables_reduces_nothing() -> None:
    train = TrainSpec(seq_len=16, adapter=LORA)
    assert simulate(tiny, train, Plan(dp_shard=2)).count("reduce_scatter") == BLOCKS


def test_ddp_reduces_every_gradient_in_buckets() -> None:
    result = simulate(tiny, TRAIN, Plan(dp_replicate=2, torch_ddp=True))
    gradients = 4 * num_parameters(trained=True, adapter=False)
    (reduce,) = result.collectives
    assert (reduce.kind, reduce.num_bytes) == ("all_reduce", gradients)
    assert result.kinds["ddp_buckets"] == pytest.approx(gradients, rel=0.01)


def test_replicas_reduce_every_gradient_where_it_lies() -> None:
    result = simulate(tiny, TRAIN, Plan(dp_replicate=2))
    gradients = 4 * num_parameters(trained=True, adapter=False)
    (reduce,) = result.collectives
    assert (reduce.kind, reduce.num_bytes) == ("all_reduce", gradients)
    assert result.kinds["flat_gradients"] == pytest.approx(gradients, rel=0.01)
    assert "gradients" not in result.kinds


def test_micro_batches_gather_and_reduce_again() -> None:
    once = simulate(tiny, TRAIN, Plan(dp_shard=2))
    train = TrainSpec(micro_batch_size=2, seq_len=16, accumulate=5)
    every = simulate(tiny, train, Plan(dp_shard=2))
    deferred = simulate(tiny, train, Plan(dp_shard=2, defer_gradient_sync=True))
    assert every.count("all_gather") == 5 * once.count("all_gather")
    assert every.count("reduce_scatter") == 5 * once.count("reduce_scatter")
    assert deferred.count("reduce_scatter") == once.count("reduce_scatter")
    assert deferred.kinds["gradients"] >= 4 * num_parameters(trained=True, adapter=False)


@pytest.mark.parametrize("torch_ddp", [True, False])
def test_ddp_sends_once_however_many_micro_batches(torch_ddp: bool) -> None:
    train = TrainSpec(micro_batch_size=2, seq_len=16, accumulate=5)
    assert simulate(tiny, train, Plan(dp_replicate=2, torch_ddp=torch_ddp)).count("all_reduce") == 1


def test_kinds_add_up_at_every_moment() -> None:
    result = simulate(tiny, TRAIN, Plan(dp_shard=2))
    assert result.allocated_bytes == max(moment.allocated_bytes for moment in result.moments)
    for moment in result.moments:
        assert sum(moment.kinds.values()) == moment.allocated_bytes
    names = [moment.name for moment in result.moments]
    assert names[0] == "before the blocks"
    assert names[-1] == "optimizer step"
    assert names.index("end of forward") < names.index("backward of block 2") < names.index("backward of block 0")


def test_reserved_is_at_least_allocated_and_device_more() -> None:
    one, two = simulate(tiny, TRAIN, Plan()), simulate(tiny, TRAIN, Plan(dp_replicate=2))
    assert one.allocated_bytes <= one.reserved_bytes < one.device_bytes
    assert two.device_bytes - two.reserved_bytes > one.device_bytes - one.reserved_bytes


def test_a_chunked_loss_never_holds_all_logits() -> None:
    sizes = {"vocab_size": 4096, "max_position_embeddings": 8192}
    full, chunked = (
        simulate(lambda: make_llama(**sizes), TrainSpec(seq_len=8192, loss=loss), Plan())  # type: ignore[arg-type]
        for loss in ("full", "chunked")
    )
    logits_fp32 = 4 * 8192 * 4096
    assert full.allocated_bytes - chunked.allocated_bytes > 2 * logits_fp32


def test_gradients_are_there_in_forward_under_lightning_and_not_in_a_plain_loop() -> None:
    kinds = {}
    for zero_grad in ("before_backward", "after_step"):
        result = simulate(tiny, TRAIN, Plan(), zero_grad=zero_grad)  # type: ignore[arg-type]
        kinds[zero_grad] = next(m for m in result.moments if m.name == "end of forward").kinds
    assert kinds["before_backward"]["gradients"] == kinds["before_backward"]["trained_weights"]
    assert "gradients" not in kinds["after_step"]


@pytest.mark.parametrize("implementation", ["foreach", "fused", "loop"])
def test_the_optimizers_temporaries_follow_its_implementation(implementation: str) -> None:
    train = TrainSpec(seq_len=16, optimizer_implementation=implementation)  # type: ignore[arg-type]
    step = simulate(tiny, train, Plan()).moments[-1].kinds
    extra = step.get("optimizer_step", 0)
    if implementation == "foreach":
        assert extra == pytest.approx(step["trained_weights"], rel=0.05)
    else:
        # A square root and its quotient of the largest tensor at a time.
        assert extra == pytest.approx(0 if implementation == "fused" else 2 * 4 * VOCABULARY * 32, abs=1024)


def test_the_optimizers_shape_arithmetic_is_not_memory() -> None:
    """DTensor works out results on whole shapes under the same fake mode; counted, that is four times the shards."""
    step = simulate(tiny, TRAIN, Plan(dp_shard=4)).moments[-1].kinds
    assert step["optimizer_step"] == pytest.approx(step["trained_weights"], rel=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        {"dp_replicate": 2, "static_graph": True},
        {"dp_replicate": 2, "bucket_cap_mb": 0.01},
        {"dp_shard": 2, "prefetch": 2},
        {"dp_shard": 4, "reshard_after_forward": 2},
        {"dp_shard": 2, "resident_blocks": 2},
        {"dp_shard": 2, "adapters": "replicated"},
        {"dp_shard": 2, "activation_checkpoint": "selective"},
        {"dp_replicate": 2, "activation_checkpoint": "full", "activation_checkpoint_blocks": 1},
        {"dp_shard": 2, "compile": True},
    ],
    ids=str,
)
def test_everything_a_plan_can_ask_for_runs(changes: dict[str, Any]) -> None:
    plan, train = Plan(**changes), TrainSpec(seq_len=16, adapter=LORA)
    result = simulate(tiny, train, plan)
    assert result.plan == plan
    assert sum(result.kinds.values()) == result.allocated_bytes
    assert result.count("all_reduce") + result.count("reduce_scatter") > 0


def test_replicated_adapters_keep_their_gradients_in_one_buffer() -> None:
    train = TrainSpec(seq_len=16, adapter=LORA)
    step = simulate(tiny, train, Plan(dp_shard=2, adapters="replicated")).moments[-1].kinds
    gradients = 4 * num_parameters(trained=True, adapter=True)
    assert gradients <= step["flat_gradients"] < gradients + 512


def test_the_figures_survive_json() -> None:
    result = simulate(tiny, TRAIN, Plan(dp_shard=2))
    assert Simulation.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_torch_is_left_as_it_was() -> None:
    def state() -> tuple[object, ...]:
        return (
            dist.is_initialized(),
            torch.get_default_dtype(),
            torch.UntypedStorage.resize_,
            nn.functional.dropout,
            torch.get_rng_state().tolist(),
            torch.cpu.current_stream(),
            torch.is_grad_enabled(),
            sys.excepthook,
        )

    before = state()
    simulate(tiny, TrainSpec(seq_len=16, adapter=LORA), Plan(dp_shard=2))
    assert state() == before


def test_torch_is_left_as_it_was_after_a_failure() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            raise KeyError("broken")

    resize = torch.UntypedStorage.resize_
    with pytest.raises(KeyError, match="broken"):
        simulate(Broken, TRAIN, Plan(dp_replicate=2), batch=torch.zeros(2, 4))
    assert not dist.is_initialized()
    assert torch.UntypedStorage.resize_ is resize
    assert type(torch.zeros(1)) is torch.Tensor


@pytest.mark.parametrize("plan", [Plan(), Plan(dp_replicate=4), Plan(dp_shard=4), Plan(dp_shard=2, dp_replicate=2)])
def test_a_process_group_in_use_is_set_aside(plan: Plan) -> None:
    expected = simulate(tiny, TRAIN, plan)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert simulate(tiny, TRAIN, plan).moments == expected.moments
        assert dist.group.WORLD is group
        assert dist.get_backend() == "gloo"
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [1, 1, 1]
        dist.new_group([0])
    finally:
        dist.destroy_process_group()


def test_what_the_engine_does_not_do_is_refused() -> None:
    with pytest.raises(ValueError, match="offload='all' of a replicated plan"):
        simulate(tiny, TRAIN, Plan(dp_replicate=2, offload="all"))


def test_an_optimizer_torch_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer='lion' cannot be simulated.*adamw"):
        simulate(tiny, TrainSpec(seq_len=16, optimizer="lion"), Plan())


def test_a_module_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no training_step"):
        simulate(lambda: nn.Linear(2, 2), TRAIN, Plan())


def test_tensor_parallel_ranks_share_every_matrix() -> None:
    one, two = simulate(tiny, TRAIN, Plan()), simulate(tiny, TRAIN, Plan(tp=2))
    blocks = 4 * BLOCKS * 9216
    embeddings = 4 * 2 * VOCABULARY * 32
    assert one.kinds["trained_weights"] == pytest.approx(blocks + embeddings, rel=0.05)
    assert two.kinds["trained_weights"] == pytest.approx((blocks + embeddings) / 2, rel=0.05)
    # Forward sums the outputs of the embedding, o_proj and down_proj; backward the gradients of the five layers' inputs
    # and of the head's.
    assert two.count("all_reduce") == BLOCKS * (2 + 5) + 2


def test_offloaded_shards_take_nothing_on_the_device() -> None:
    here, away = simulate(tiny, TRAIN, Plan(dp_shard=2)), simulate(tiny, TRAIN, Plan(dp_shard=2, offload="all"))
    for moment in away.moments:
        assert {"trained_weights", "optimizer_state", "gradients", "optimizer_step"}.isdisjoint(moment.kinds)
    assert away.collectives == here.collectives


@pytest.mark.parametrize(("loss", "forward", "backward"), [("narrow", 4, 6), ("shifted", 14, 12), ("kept", 10, 16)])
def test_logits_take_what_the_loss_makes_of_them(loss: str, forward: int, backward: int) -> None:
    """Bytes per logit at the end of forward (bf16 and FP32 logits, copies, log-softmax) and at the start of backward
    (log-softmax and two gradients); 10 and 12 with transformers' own loss.
    """
    words, tokens = 4096, 2 * 64
    full, other = (
        simulate(
            lambda: make_llama(vocab_size=words),
            TrainSpec(micro_batch_size=2, seq_len=64, loss=which),  # type: ignore[arg-type]
            Plan(),
        )
        for which in ("full", loss)
    )
    for moment, expected, usual in (("end of forward", forward, 10), ("start of backward", backward, 12)):
        sizes = [next(m for m in run.moments if m.name == moment).allocated_bytes for run in (full, other)]
        # A "shifted" copy leaves out the last position of each row.
        assert sizes[1] - sizes[0] == pytest.approx((expected - usual) * words * tokens, abs=0.2 * words * tokens)


def choices_of_layout(monkeypatch: pytest.MonkeyPatch, blocks: int, plan: Plan) -> tuple[Simulation, int]:
    """What a simulated step of adapters counts, and how often DTensor chose the layout of a tensor for it."""
    from torch.distributed.tensor._ops import utils

    choose, calls = utils.expand_to_full_mesh_op_strategy, []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return choose(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(utils, "expand_to_full_mesh_op_strategy", counting)
        result = simulate(
            lambda: make_llama(num_hidden_layers=blocks), TrainSpec(seq_len=16, adapter=LORA), plan, depth="full"
        )
    return result, len(calls)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(dp_shard=4), id="fsdp2", marks=pytest.mark.slow),
        pytest.param(Plan(dp_replicate=2, dp_shard=2), id="hsdp"),
        pytest.param(Plan(dp_shard=2, tp=2), id="tp", marks=pytest.mark.slow),
    ],
)
def test_adapters_that_are_alike_are_laid_out_once(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    """The same step to the byte, without the time that grows with the square of the adapters' number."""
    few, many = (choices_of_layout(monkeypatch, blocks, plan) for blocks in (2, 4))
    assert many[1] == few[1] > 0
    monkeypatch.setattr(run, "quick_list_layouts", tuple)
    slowly, choices = choices_of_layout(monkeypatch, 4, plan)
    assert choices > many[1]
    assert slowly == dataclasses.replace(many[0], wall_s=slowly.wall_s)
