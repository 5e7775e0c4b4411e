"""Each memory term against its own arithmetic."""

import dataclasses
import math

import pytest
from hand_specs import LLAMA_2_7B, LLAMA_8B, cluster, llama

from lightning_shard.activations import block_activations
from lightning_shard.memory import OVERHEADS, TERMS, Moment, estimate_memory
from lightning_shard.memory.groups import shard_numel
from lightning_shard.memory.situation import Situation, make_situation
from lightning_shard.plans import Plan
from lightning_shard.specs import AdapterSpec, ModelSpec, TensorSpec, TrainSpec

DDP, FSDP, ONE = Plan(dp_replicate=8), Plan(dp_shard=8), Plan()
TORCH_DDP = Plan(dp_replicate=8, torch_ddp=True)
LORA = TrainSpec(seq_len=2048, adapter=AdapterSpec(r=16))
FULL = TrainSpec(seq_len=2048)


def situation(train: TrainSpec, plan: Plan, model: ModelSpec = LLAMA_8B) -> Situation:
    return make_situation(model, train, plan, cluster())


def term(name: str, train: TrainSpec, plan: Plan, moment: Moment = Moment.LOSS, model: ModelSpec = LLAMA_8B) -> int:
    return TERMS[name](situation(train, plan, model), moment)


def test_terms_add_up() -> None:
    for train in (LORA, FULL):
        for plan in (DDP, FSDP, ONE):
            estimate = estimate_memory(LLAMA_8B, train, plan, cluster())
            live = sum(size for name, size in estimate.terms.items() if name in TERMS)
            assert live == estimate.allocated_bytes == max(estimate.moments.values())
            assert estimate.reserved_bytes == live + estimate.terms["allocator_slack"]
            assert sum(estimate.terms.values()) == estimate.device_bytes
            assert set(estimate.terms) <= set(TERMS) | set(OVERHEADS)
            assert estimate.peak_at in {moment.value for moment in Moment}


def test_frozen_bytes_are_2p_over_n_and_trained_4t_over_n() -> None:
    """E6: only what trains is FP32."""
    trained = LLAMA_8B.with_adapter(AdapterSpec(r=16)).num_trainable
    assert term("frozen_weights", LORA, FSDP) == 2 * LLAMA_8B.num_parameters // 8
    assert term("trained_weights", LORA, FSDP) == 4 * trained // 8
    assert term("frozen_weights", LORA, DDP) == 2 * LLAMA_8B.num_parameters
    assert term("trained_weights", LORA, DDP) == 4 * trained
    assert term("frozen_weights", FULL, FSDP) == 0
    assert term("trained_weights", FULL, FSDP) == 4 * LLAMA_8B.num_parameters // 8


@pytest.mark.parametrize("plan", [ONE, DDP, FSDP])
def test_state_on_the_host_is_all_that_is_gone(plan: Plan) -> None:
    away = dataclasses.replace(plan, offload="optimizer")
    for name in TERMS:
        here, there = (term(name, FULL, each, Moment.OPTIMIZER) for each in (plan, away))
        assert there == (0 if name in ("optimizer_state", "optimizer_step") else here)
    assert term("optimizer_state", FULL, plan) == 8 * LLAMA_8B.num_parameters // plan.dp_shard


def test_states_of_a_7b_lora_are_16_bytes_per_trained_parameter() -> None:
    """L13: frozen parameters have neither gradients nor optimizer state."""
    trained = LLAMA_2_7B.with_adapter(AdapterSpec(r=16)).num_trainable
    at_step = {name: term(name, LORA, ONE, Moment.OPTIMIZER, LLAMA_2_7B) for name in TERMS}
    states = at_step["trained_weights"] + at_step["gradients"] + at_step["optimizer_state"]
    assert states == 16 * trained
    assert at_step["optimizer_state"] == 8 * trained


def test_our_multiplier_in_full_training_is_16() -> None:
    """L14: master 4, gradient 4, two moments 8, per parameter and divided by the shards."""
    at_step = {name: term(name, FULL, FSDP, Moment.OPTIMIZER) for name in TERMS}
    states = at_step["trained_weights"] + at_step["gradients"] + at_step["optimizer_state"]
    assert states == 16 * LLAMA_8B.num_parameters // 8


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_parameter"),
    [("adamw", 8), ("Adam", 8), ("sgd", 0), ("sgd-momentum", 4), ("SGD_momentum", 4), ("adagrad", 4), ("lion", 4)],
)
def test_optimizer_state(optimizer: str, bytes_per_parameter: int) -> None:
    train = TrainSpec(seq_len=128, optimizer=optimizer)
    assert term("optimizer_state", train, ONE) == bytes_per_parameter * LLAMA_8B.num_parameters


def test_adafactor_keeps_rows_and_columns() -> None:
    rows_and_columns = sum(unit.count * sum(tensor.shape) for unit in LLAMA_8B.units for tensor in unit.tensors)
    assert term("optimizer_state", TrainSpec(optimizer="adafactor"), ONE) == 4 * rows_and_columns


def test_step_temporaries() -> None:
    everything = 4 * LLAMA_8B.num_parameters
    assert term("optimizer_step", FULL, ONE, Moment.OPTIMIZER) == everything
    assert term("optimizer_step", TrainSpec(optimizer_implementation="fused"), ONE, Moment.OPTIMIZER) == 0
    loop = term("optimizer_step", TrainSpec(optimizer_implementation="loop"), ONE, Moment.OPTIMIZER)
    assert loop == 4 * 128256 * 4096
    assert term("optimizer_step", FULL, ONE, Moment.LOSS) == 0


@pytest.mark.parametrize(("name", "plan"), [("flat_gradients", DDP), ("ddp_buckets", TORCH_DDP)])
def test_one_buffer_holds_all_gradients_of_a_replica(name: str, plan: Plan) -> None:
    trained = LLAMA_8B.with_adapter(AdapterSpec(r=16)).num_trainable
    assert term(name, LORA, plan) == 4 * trained
    assert term("flat_gradients", LORA, plan) + term("ddp_buckets", LORA, plan) == 4 * trained
    assert term("gradients", LORA, plan, Moment.OPTIMIZER) == 0
    assert term(name, LORA, FSDP) == term(name, LORA, ONE) == 0


def test_gathered_weights() -> None:
    block, head, norm = 218_112_000, 128256 * 4096, 4096
    assert term("gathered_weights", FULL, DDP) == 0
    assert term("gathered_weights", FULL, FSDP, Moment.OPTIMIZER) == 0
    assert term("gathered_weights", FULL, FSDP, Moment.FORWARD_END) == 2 * (norm + head + head)
    assert term("gathered_weights", FULL, FSDP, Moment.LOSS) == 2 * (norm + head)
    assert term("gathered_weights", FULL, FSDP, Moment.HEAD) == 2 * (norm + head + block)
    assert term("gathered_weights", FULL, FSDP, Moment.TOP) == 2 * (norm + 2 * block)
    kept = term("gathered_weights", FULL, Plan(dp_shard=8, reshard_after_forward=False), Moment.LOSS)
    assert kept == 2 * (norm + head + 32 * block + head)
    fourth = term("gathered_weights", FULL, Plan(dp_shard=8, reshard_after_forward=4), Moment.LOSS)
    assert fourth == 2 * (norm + head) + 2 * (32 * block + head) // 4


def test_resident_blocks_are_whole_where_frozen_and_kept_where_they_train() -> None:
    plan = Plan(dp_shard=8, resident_blocks=8)
    block = 218_112_000
    at_rest = term("frozen_weights", LORA, plan) - term("frozen_weights", LORA, FSDP)
    assert at_rest == 2 * 8 * block * 7 // 8
    kept = term("gathered_weights", FULL, plan) - term("gathered_weights", FULL, FSDP)
    assert kept == 2 * 8 * block
    everything = Plan(dp_shard=8, resident_blocks=32)
    assert term("frozen_weights", LORA, everything) == 2 * LLAMA_8B.num_parameters


def test_replicated_adapters_are_whole_and_outside_the_groups() -> None:
    trained = LLAMA_8B.with_adapter(AdapterSpec(r=16)).num_trainable
    plan = Plan(dp_shard=8, adapters="replicated")
    assert term("trained_weights", LORA, plan) == 4 * trained
    assert term("flat_gradients", LORA, plan) == 4 * trained
    assert term("optimizer_state", LORA, plan) == 8 * trained
    assert term("gradients", LORA, plan, Moment.OPTIMIZER) == 0
    assert term("reduce_buffers", LORA, plan, Moment.EMBEDDING) == 0


def test_accumulating_under_ddp_holds_gradients_beside_the_buckets() -> None:
    train = TrainSpec(seq_len=2048, accumulate=4)
    everything = 4 * LLAMA_8B.num_parameters
    assert term("gradients", train, TORCH_DDP) == term("ddp_buckets", train, TORCH_DDP) == everything
    assert term("gradients", train, TORCH_DDP, Moment.OPTIMIZER) == 0
    assert term("gradients", FULL, TORCH_DDP) == 0
    assert term("gradients", train, DDP) == 0
    assert term("flat_gradients", train, DDP) == everything


def test_a_tied_table_stays_gathered_with_the_root() -> None:
    tied = llama(hidden=64, layers=4, heads=4, kv_heads=2, ffn=128, vocab=256, tied=True)
    gathered = term("gathered_weights", TrainSpec(seq_len=8), Plan(dp_shard=2), Moment.EMBEDDING, tied)
    assert gathered == 2 * (256 * 64 + 64)


def test_compute_copies_are_ddp_masters_cast_down() -> None:
    embedding = 128256 * 4096
    assert term("compute_copies", FULL, DDP) == 2 * (LLAMA_8B.num_parameters - embedding)
    assert term("compute_copies", FULL, FSDP) == 0
    assert term("compute_copies", TrainSpec(precision="32-true"), DDP) == 0


@pytest.mark.parametrize("ranks", [3, 8, 100, 512])
def test_uneven_rows_round_up_on_the_worst_rank(ranks: int) -> None:
    weight = TensorSpec(name="w", shape=(1000, 7), owner="Linear")
    assert shard_numel(weight, ranks) == math.ceil(1000 / ranks) * 7
    norm = TensorSpec(name="w", shape=(1000,))
    assert shard_numel(norm, ranks) == math.ceil(1000 / ranks)


def test_lora_a_is_not_padded_to_the_world() -> None:
    """With r below the world its columns are cut; row by row 512 ranks would hold 32 times the adapter."""
    lora_a = TensorSpec(name="lora_A.weight", shape=(16, 4096), adapter=True)
    assert shard_numel(lora_a, 512) == 16 * 4096 // 512


def test_deferred_gradients_are_whole_and_fp32() -> None:
    plan = Plan(dp_shard=8, defer_gradient_sync=True)
    train = TrainSpec(seq_len=2048, accumulate=4)
    assert term("deferred_gradients", train, plan) == 4 * LLAMA_8B.num_parameters
    assert term("deferred_gradients", FULL, plan) == 0
    assert term("deferred_gradients", train, FSDP) == 0


def test_logits_are_12_bytes_per_entry_at_the_start_of_backward() -> None:
    """L11: 10 to 16 bytes per logit, not 2 or 4."""
    logits = 2048 * 128256
    assert term("logits_and_loss", FULL, ONE, Moment.FORWARD_END) == 10 * logits
    assert term("logits_and_loss", FULL, ONE, Moment.LOSS) == 12 * logits
    chunked = TrainSpec(seq_len=65536, loss="chunked")
    assert term("logits_and_loss", chunked, ONE, Moment.LOSS) == 12 * 1024 * 128256


def test_eager_attention_is_counted_only_where_asked() -> None:
    """L10: an estimate that assumes S^2 scores is twice the truth at long context."""
    sdpa = term("activations", TrainSpec(seq_len=8192), ONE)
    eager = term("activations", TrainSpec(seq_len=8192, attention="eager"), ONE)
    assert eager > sdpa + 32 * 32 * 8192 * 8192 * 6


@pytest.mark.parametrize(("seq_len", "batch", "real_gb"), [(2048, 2, 9), (8192, 1, 10)])
def test_a_four_bit_base_with_fused_attention(seq_len: int, batch: int, real_gb: float) -> None:
    """L10: Llama-3.1-8B in 4 bits takes about 9 GB and 10 GB at longer context, where eager attention in the estimate
    made 21 and 57 of them. Two packed values share a byte; tables and head are in bf16.
    """
    model = LLAMA_8B.with_adapter(AdapterSpec(r=16))

    def packed(tensor: TensorSpec) -> TensorSpec:
        if tensor.owner != "Linear" or tensor.trainable:
            return tensor
        return dataclasses.replace(tensor, dtype="uint8", shape=(tensor.shape[0] // 2, *tensor.shape[1:]))

    units = [
        dataclasses.replace(unit, tensors=tuple(map(packed, unit.tensors))) if unit.kind == "block" else unit
        for unit in model.units
    ]
    model = dataclasses.replace(model, units=tuple(units))
    train = TrainSpec(seq_len=seq_len, micro_batch_size=batch, loss="chunked", adapter=AdapterSpec(r=16))
    plan, where = Plan(activation_checkpoint="full"), cluster(devices=1)
    assert estimate_memory(model, train, plan, where).allocated_bytes / 1e9 == pytest.approx(real_gb, rel=0.1)
    eager = estimate_memory(model, dataclasses.replace(train, attention="eager"), plan, where)
    assert seq_len < 8192 or eager.allocated_bytes > 2 * real_gb * 1e9


def test_checkpointing_keeps_block_inputs_and_one_block() -> None:
    plan = Plan(dp_shard=8, activation_checkpoint="full")
    at_loss = term("activations", FULL, plan)
    tail = 2048 * 4096 * (4 + 2 + 2)  # the last norm's input in FP32, its operand, and the head's input
    assert at_loss == 2048 * 32 * 2 * 4096 + tail
    whole = term("activations", FULL, FSDP)
    assert term("activations", FULL, plan, Moment.TOP) == at_loss - tail + (whole - tail) // 32
    half = term("activations", FULL, Plan(dp_shard=8, activation_checkpoint="full", activation_checkpoint_blocks=16))
    assert at_loss < half < whole


def test_known_block_sizes() -> None:
    """Bytes per token of a Llama-3.1-8B block, as counted on the real one."""

    def per_token(model: ModelSpec, **wishes: object) -> int:
        many = 512  # tokens, so that every tensor is a whole number of allocations
        return block_activations(model, model.blocks[0], TrainSpec(seq_len=many, **wishes)).kept_bytes // many  # type: ignore[arg-type]

    assert per_token(LLAMA_8B) == 200_840
    assert per_token(LLAMA_2_7B) == 186_504
    assert per_token(LLAMA_8B, precision="32-true") == 368_776
    assert per_token(LLAMA_8B.with_adapter(AdapterSpec(r=16))) == 184_680
    assert per_token(LLAMA_8B.with_adapter(AdapterSpec(r=16, target_modules=("q_proj", "v_proj")))) == 147_656
    assert per_token(LLAMA_8B.with_adapter(AdapterSpec(r=16, compute_dtype="float32"))) == 295_496


def test_rank_hardly_matters_and_targets_do() -> None:
    """L6: rank 32 to 64 moves a 3B by 260 MB, the choice of modules by 2.4 GB."""
    model = llama(hidden=3072, layers=28, heads=24, kv_heads=8, ffn=8192, tied=True)
    where = cluster("h100-sxm", devices=1)

    def allocated(r: int, targets: tuple[str, ...]) -> int:
        adapter = AdapterSpec(r=r, target_modules=targets, compute_dtype="float32")
        train = TrainSpec(micro_batch_size=4, seq_len=768, adapter=adapter)
        return estimate_memory(model, train, ONE, where).allocated_bytes

    qv, mlp = ("q_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
    assert 100e6 < allocated(64, qv) - allocated(32, qv) < 350e6
    assert 1.5e9 < allocated(10, mlp) - allocated(32, qv) < 3.5e9


@pytest.mark.parametrize(
    ("sizes", "batch", "compute_dtype", "published_mib"),
    [
        ({"hidden": 896, "layers": 24, "heads": 14, "ffn": 4864}, 8, "float32", 6238),
        ({"hidden": 896, "layers": 24, "heads": 14, "ffn": 4864}, 8, None, 5002),
        ({"hidden": 1536, "layers": 28, "heads": 12, "ffn": 8960}, 4, None, 7840),
    ],
)
def test_peft_keeps_fp32_copies_of_what_adapters_read(
    sizes: dict[str, int], batch: int, compute_dtype: str | None, published_mib: int
) -> None:
    """E7 and L9: Qwen2.5 with LoRA r64 on all linears, 4,096 tokens, with peft's FP32 copies and without.

    The published 10,352 MiB of the 1.5B with copies is not among them. A block's linears read 18,176 numbers a token:
    1,136 MiB in FP32 for its 16,384 tokens, one block at a time, where the two published figures differ by 2,512 MiB;
    those of the 0.5B differ by 1,236 MiB, and its copies take 1,280.
    """
    model = llama(**sizes, kv_heads=2, vocab=151936, tied=True)  # type: ignore[arg-type]
    adapter = AdapterSpec(r=64, compute_dtype=compute_dtype)
    train = TrainSpec(micro_batch_size=batch, seq_len=4096, adapter=adapter, loss="chunked")
    estimate = estimate_memory(model, train, Plan(activation_checkpoint="full"), cluster("a100-40", devices=1))
    assert estimate.allocated_bytes / 2**20 == pytest.approx(published_mib, rel=0.12)


def test_activations_grow_with_the_batch_and_states_do_not() -> None:
    """L1: bs 4 to 8 of 4096 tokens adds 12 GB to a checkpointed 7B, and nothing to what is there after loading."""
    plan = Plan(activation_checkpoint="full")
    sizes = {}
    for batch in (4, 8):
        train = TrainSpec(micro_batch_size=batch, seq_len=4096, adapter=AdapterSpec(r=16))
        sizes[batch] = estimate_memory(LLAMA_2_7B, train, plan, cluster(devices=1))
    assert sizes[8].allocated_bytes - sizes[4].allocated_bytes > 8e9
    assert sizes[8].load_peak_bytes == sizes[4].load_peak_bytes


def test_loading_holds_one_whole_group_beside_the_shards() -> None:
    """L19: the peak of loading is its own figure."""
    estimate = estimate_memory(LLAMA_8B, LORA, FSDP, cluster())
    at_rest = estimate.terms["frozen_weights"] + estimate.terms["trained_weights"]
    assert estimate.load_peak_bytes == at_rest + 2 * 128256 * 4096
    assert estimate.load_device_bytes > estimate.load_peak_bytes


def test_loading_a_small_model_on_two_devices_takes_no_more_than_alone() -> None:
    """L19: Qwen2.5-1.5B with LoRA takes about 3,700 MiB alone, and must not take more on each of two after set-up."""
    qwen = llama(hidden=1536, layers=28, heads=12, kv_heads=2, ffn=8960, vocab=151936, tied=True)
    train = TrainSpec(seq_len=128, adapter=AdapterSpec(r=16))
    alone = estimate_memory(qwen, train, ONE, cluster(devices=1))
    assert alone.load_peak_bytes < 3700 * 2**20
    for plan in (Plan(dp_replicate=2), Plan(dp_shard=2)):
        assert estimate_memory(qwen, train, plan, cluster(devices=2)).load_peak_bytes <= alone.load_peak_bytes


def test_states_of_a_sharded_6b_halve_from_two_devices_to_four() -> None:
    """L12: an estimate of 0.77 GB, the same for 2 and for 4 devices, stood against 13 GB seen for GPT-J-6B."""
    model = llama(hidden=4096, layers=28, heads=16, kv_heads=16, ffn=11008, vocab=50400)
    sizes = {}
    for devices in (2, 4):
        estimate = estimate_memory(model, FULL, Plan(dp_shard=devices), cluster(devices=devices))
        sizes[devices] = sum(estimate.terms[name] for name in ("trained_weights", "optimizer_state"))
        assert estimate.allocated_bytes > 13e9
    assert sizes[2] == pytest.approx(2 * sizes[4], rel=1e-3)
