"""Terms of the step's time, by hand."""

import dataclasses

import pytest
from hand_specs import LLAMA_8B, cluster

from lightning_shard.hardware import HOST, Cluster, find_link
from lightning_shard.memory.situation import make_situation
from lightning_shard.plans import Plan
from lightning_shard.specs import AdapterSpec, TrainSpec
from lightning_shard.timing import compute_flops, time_step
from lightning_shard.timing.adapters import adapter_s

ONE = cluster("a100-80", devices=1)


def seconds(adapter: AdapterSpec) -> float:
    return adapter_s(make_situation(LLAMA_8B, TrainSpec(seq_len=1024, adapter=adapter), Plan(), ONE))


def test_dora_takes_a_norm_of_every_weight_however_short_the_batch() -> None:
    dora, plain = (
        [
            adapter_s(make_situation(LLAMA_8B, TrainSpec(seq_len=seq_len, adapter=adapter), plan, ONE))
            for seq_len, plan in ((1, Plan()), (2, Plan()), (2, Plan(tp=2)))
        ]
        for adapter in (AdapterSpec(target_modules=("q_proj",), method=method) for method in ("dora", "lora"))
    )
    norm = 32 * 2 * 9 * 4096**2 / ONE.device.memory_bytes_per_s
    assert 2 * (dora[0] - plain[0]) - (dora[1] - plain[1]) == pytest.approx(norm)
    assert dora[2] < dora[1] / 5  # half of the weights, in fewer passes


def test_adapters_are_as_fast_as_memory() -> None:
    targets = ("q_proj",)
    plain = AdapterSpec(r=16, target_modules=targets)
    # bf16: read the input; write the product, read and write its scale, read two and write one for the sum.
    assert seconds(plain) == pytest.approx(32 * 1024 * 4096 * (2 + 2 + 4 + 6) / 2.039e12)
    # FP32 with dropout: cast 2 + 4, dropout 4 + 4 + 1, product 4; product 4, scale 8, sum 2 + 4 + 4, cast 4 + 2.
    wide = dataclasses.replace(plain, compute_dtype="float32", dropout=0.1)
    assert seconds(wide) == pytest.approx(32 * 1024 * 4096 * (19 + 28) / 2.039e12)
    assert seconds(dataclasses.replace(plain, r=64)) == seconds(plain)


def test_full_training_has_no_such_term() -> None:
    situation = make_situation(LLAMA_8B, TrainSpec(seq_len=1024), Plan(), ONE)
    assert adapter_s(situation) == 0.0
    speed = ONE.device.flops_of("bfloat16") * ONE.device.efficiency
    assert time_step(situation).compute_s == pytest.approx(sum(compute_flops(situation)) / speed)


@pytest.mark.parametrize("split", [True, False])
def test_ranks_that_split_layers_count_the_head_once(split: bool) -> None:
    """Where each computes the whole head, the model's own FLOPs have it once."""
    train, rows = TrainSpec(seq_len=1024), 128256 if split else 128257
    model = LLAMA_8B._map_tensors(
        lambda t: t if t.shape[0] != 128256 else dataclasses.replace(t, shape=(rows, *t.shape[1:]))
    )
    one, four = (make_situation(model, train, Plan(tp=tp), cluster()) for tp in (1, 4))
    assert 4 * sum(compute_flops(four, own=True)) == pytest.approx(
        sum(compute_flops(one)), rel=1e-3
    )  # norms are in blocks
    head = 6 * 128256 * 4096 * 1024
    again = 4 * sum(compute_flops(four)) - sum(compute_flops(one))
    assert again == pytest.approx(0 if split else 3 * head, rel=0.01, abs=2e-3 * head)  # norms


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_hosts_work_for_shards(nodes: int) -> None:
    """Each gather and reduction costs its cores time, inside a host and over a network."""
    links = {"intra_link": find_link("loopback"), "inter_link": find_link("eth10")}
    many = Cluster(num_nodes=nodes, devices_per_node=4 // nodes, device=HOST, accelerator="cpu", **links)
    idle = dataclasses.replace(many, device=dataclasses.replace(HOST, host_work_s=0.0))
    train = TrainSpec(seq_len=1024)
    more = {}
    for plan in (Plan(dp_shard=4), Plan(dp_shard=4, reshard_after_forward=False), Plan(dp_replicate=4)):
        seconds = [time_step(make_situation(LLAMA_8B, train, plan, where)).step_s for where in (many, idle)]
        more[plan] = (seconds[0] - seconds[1]) / HOST.host_work_s
    blocks, rest = LLAMA_8B.num_blocks, 3  # the embedding, the head with the last norm, and what is left
    expected = (3 * blocks + 2 * rest, 2 * blocks + 2 * rest, 0)
    assert tuple(more.values()) == pytest.approx(expected, abs=2.01)


def test_between_hosts_transfers_pass_beside_compute() -> None:
    """Without gathering ahead they add up; with it the longer of both counts, unit by unit, less the ends."""
    link = dataclasses.replace(find_link("eth10"), bytes_per_s=1e8)  # a tenth of what the cores carry inside a host
    links = {"intra_link": find_link("loopback"), "inter_link": link}
    hosts = Cluster(num_nodes=2, devices_per_node=1, device=HOST, accelerator="cpu", **links)
    train = TrainSpec(seq_len=1024)
    apart, ahead = (time_step(make_situation(LLAMA_8B, train, Plan(dp_shard=2, prefetch=n), hosts)) for n in (0, 1))
    assert apart.exposed_s == pytest.approx(apart.comm_s, rel=0.01)
    assert 0 < ahead.exposed_s < 0.5 * apart.exposed_s
