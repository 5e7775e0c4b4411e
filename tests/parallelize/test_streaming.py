"""Weights read from safetensors straight into shards: bit-equal to a naive load, and no more held than is kept."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.llama import EPS, TinyLlama, llama_config, make_tokens
from lightning.pytorch import LightningModule
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from typing_extensions import override

import lightning_shard.parallelize as wrapping
from lightning_shard import AutoShardStrategy, FSDP2Strategy, Plan, from_pretrained, lora, stream_weights
from lightning_shard.parallelize import parallelize, weights
from lightning_shard.parallelize.materialize import Materializer
from lightning_shard.parallelize.streaming import Places, find_places, source_of, stream_in
from lightning_shard.parallelize.weights import open_folder
from lightning_shard.simulate.tracker import SETUP, Tracker
from lightning_shard.specs import find_precision
from lightning_shard.testing import RankError, assert_parity, run_ranks, run_trainer

CPU = torch.device("cpu")
ODD = {"intermediate_size": 65, "vocab_size": 65}
"""Sizes that two and four ranks do not divide."""


def write(folder: Path, *, dtype: torch.dtype = torch.float32, tied: bool = False, files: int = 1) -> Path:
    torch.manual_seed(5)
    model = LlamaForCausalLM(llama_config(tied=tied, **ODD)).to(dtype)
    model.save_pretrained(folder, max_shard_size="20KB" if files > 1 else "1GB")
    return folder


class Streamed(LightningModule):
    """A tiny Llama out of a folder: naive, or streamed."""

    def __init__(
        self, folder: str, *, naive: bool, method: str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.folder, self.naive, self.method, self.dtype_ = folder, naive, method, dtype
        self.model: Any = None
        self.start: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if self.model is not None:
            return
        if self.naive:
            dtype = self.dtype_ or "auto"
            model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype).train()
        else:
            model = from_pretrained(self.folder, dtype=self.dtype_)
        more = {"modules_to_save": ["lm_head"]} if self.method == "modules-to-save" else {}
        method = "lora" if more else self.method
        self.model = model if method is None else lora(model, r=4, seed=7, method=method, **more)  # type: ignore[arg-type]

    def on_fit_start(self) -> None:
        self.start = {name: whole(tensor) for name, tensor in self.state_dict().items()}
        self.buffers_ = {name: whole(tensor) for name, tensor in self.named_buffers()}

    training_step = TinyLlama.training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3, eps=EPS)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


PLANS: dict[str, Plan] = {
    "replicas": Plan(dp_replicate=2),
    "shards": Plan(dp_shard=2),
    "hsdp": Plan(dp_replicate=2, dp_shard=2),
    "half-resident": Plan(dp_shard=2, adapters="replicated", resident_blocks=1),
    "offloaded": Plan(dp_shard=2, offload="all"),
    "tensor-parallel": Plan(tp=2),
}


def starts_and_losses(folder: str, plan: Plan, **options: Any) -> None:
    seen = []
    for naive in (True, False):
        module = Streamed(folder, naive=naive, **options)
        data = make_tokens if plan.tp == 1 else lambda *_: make_tokens(0, 1)  # ranks of one product see the same
        result = run_trainer(lambda m=module: m, data, strategy=lambda: AutoShardStrategy(plan=plan), max_steps=2)
        seen.append((module.start, module.buffers_, result))
    (start, buffers, result), (start_2, buffers_2, result_2) = seen
    assert start.keys() == start_2.keys()
    for name, tensor in [*start.items(), *buffers.items()]:
        if "lora_A" in name:  # drawn at another moment: by name alone where the base is on meta
            continue
        other = {**start_2, **buffers_2}[name]
        assert tensor.dtype == other.dtype
        assert torch.equal(tensor, other), name
    if options.get("method") is None:
        assert_parity(result_2, result, rtol=1e-6)


@pytest.mark.parametrize("name", [*PLANS, "one"])
def test_a_streamed_start_is_bit_equal_to_a_naive_one(name: str, tmp_path: Path) -> None:
    plan = PLANS.get(name, Plan())
    if name == "tensor-parallel":
        LlamaForCausalLM(llama_config()).save_pretrained(tmp_path)
    else:
        write(tmp_path, files=3)
    run_ranks(plan.world_size, starts_and_losses, str(tmp_path), plan)


@pytest.mark.parametrize("method", ["lora", "dora", "modules-to-save"])
def test_adapters_on_a_streamed_base(method: str, tmp_path: Path) -> None:
    run_ranks(2, starts_and_losses, str(write(tmp_path)), Plan(dp_shard=2), method=method)


def test_ties_and_types(tmp_path: Path) -> None:
    write(tmp_path, dtype=torch.bfloat16, tied=True)
    run_ranks(2, starts_and_losses, str(tmp_path), Plan(dp_shard=2))
    run_ranks(2, starts_and_losses, str(tmp_path), Plan(dp_replicate=2), dtype=torch.float32)


# --- what is read and held -----------------------------------------------------------------------------------


def bytes_read_and_held(folder: str, strategy: Any) -> tuple[int, int, int]:
    read, largest = 0, 0
    original = weights._read

    def counted(file: int, offset: int, target: Tensor, stored: Any) -> None:
        nonlocal read, largest
        read += target.nbytes
        largest = max(largest, target.nbytes)
        original(file, offset, target, stored)

    module = Streamed(folder, naive=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "_read", counted)
        run_trainer(lambda: module, make_tokens, strategy=strategy, max_steps=1)
    held = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in module.parameters())
    return read, held, largest


def test_f5_each_rank_reads_what_it_keeps(tmp_path: Path) -> None:
    """However many ranks there are, together they read the file once, and none waits for another or stays empty."""
    folder = str(write(tmp_path, files=3))
    total = sum(t.num_bytes for t in open_folder(tmp_path).values())
    per_rank = run_ranks(4, bytes_read_and_held, folder, FSDP2Strategy)
    assert all(read == held for read, held, _ in per_rank)
    assert sum(read for read, _, _ in per_rank) == total
    replicas = run_ranks(2, bytes_read_and_held, folder, "tuned-ddp")
    assert [(read, held) for read, held, _ in replicas] == [(total, total)] * 2


def test_a_cast_waits_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "CAST_BYTES", 64)
    values = torch.randn(7, 33)
    save_file({"weight": values}, tmp_path / "model.safetensors")
    target = torch.empty(7, 33, dtype=torch.bfloat16)
    open_folder(tmp_path)["weight"].read_into(target)
    assert torch.equal(target, values.bfloat16())


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_slice_is_read(dim: int, tmp_path: Path) -> None:
    values = torch.arange(4 * 6 * 5, dtype=torch.int64).view(4, 6, 5)
    save_file({"a": torch.zeros(3), "weight": values}, tmp_path / "model.safetensors")
    wanted = values.narrow(dim, 1, 2).contiguous()
    target = torch.empty_like(wanted)
    open_folder(tmp_path)["weight"].read_into(target, dim=dim, first=1)
    assert torch.equal(target, wanted)


# --- any module, and what cannot be read ------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2)


def test_any_module_can_be_streamed_and_what_is_new_is_initialised(tmp_path: Path, caplog: Any) -> None:
    torch.manual_seed(1)
    saved = Net()
    saved.body[1].running_mean.fill_(3.0)
    state = {name: t for name, t in saved.state_dict().items() if not name.startswith("head")}
    save_file({**state, "extra": torch.zeros(1)}, tmp_path / "weights.safetensors")
    with torch.device("meta"):
        net = Net()
    stream_weights(net, tmp_path)
    assert "lacks head.weight, head.bias: initialised anew" in caplog.text
    assert "also holds extra" in caplog.text
    assert source_of(net.body[1].running_mean) is not None
    waiting = find_places(net)
    Materializer(net, seed=3, stream=True).materialize(net)
    assert source_of(net.head.weight) is None
    assert not net.head.weight.is_meta
    stream_in(waiting, CPU)
    for name, tensor in state.items():
        assert torch.equal(net.state_dict()[name], tensor), name


def broken(folder: Path, what: str) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    if what == "short":
        file.write_bytes(data[:-8])
    elif what == "not-safetensors":
        file.write_bytes(b"PK\x03\x04" + bytes(60))
    elif what == "none":
        file.unlink()
    elif what == "missing-part":
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part-2.safetensors"}}))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("short", "no whole safetensors file"),
        ("not-safetensors", "no whole safetensors file.*header"),
        ("none", "holds no safetensors file"),
        ("missing-part", "lacks part-2.safetensors"),
    ],
)
def test_files_that_cannot_be_read_are_named(what: str, message: str, tmp_path: Path) -> None:
    write(tmp_path)
    broken(tmp_path, what)
    with pytest.raises(ValueError, match=message):
        from_pretrained(str(tmp_path))


def test_other_names_and_other_shapes_are_refused(tmp_path: Path) -> None:
    save_file({"theirs": torch.zeros(2)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        layer = nn.Linear(3, 4)
    with pytest.raises(ValueError, match="No tensor in .* has a name of Linear: it has 'theirs'"):
        stream_weights(layer, tmp_path)
    save_file({"weight": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'weight' is \(4, 3\) in Linear and \(3, 4\) in"):
        stream_weights(layer, tmp_path)


def each_its_own_files(folders: Sequence[str]) -> None:
    module = Streamed(folders[dist.get_rank()], naive=False)
    run_trainer(lambda: module, make_tokens, strategy="fsdp2", max_steps=1)


def test_ranks_that_would_read_other_weights_are_told(tmp_path: Path) -> None:
    folders = [str(write(tmp_path / "a")), str(tmp_path / "b")]
    torch.manual_seed(6)
    LlamaForCausalLM(llama_config(**ODD)).save_pretrained(folders[1])
    with pytest.raises(RankError, match="Rank 1 would read other weights than rank 0"):
        run_ranks(2, each_its_own_files, folders)


class HostBytes(Tracker):
    """Counts every tensor on the host. (What the kernel says of a process wavers by tens of MB.)"""

    @override
    def _see(self, result: Any, kind: str) -> None:
        if not (isinstance(result, Tensor) and result.is_meta):
            super()._see(result, kind)


def peak_and_share(folder: str, plan: Plan) -> tuple[int, int, int]:
    """Bytes held when loading was at its fullest, that this rank keeps, and of the largest tensor."""
    model = from_pretrained(folder, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)) if plan.strategy == "fsdp2" else None
    original, host = wrapping.stream_in, HostBytes()

    def loading(places: Places, device: torch.device) -> int:
        held = original(places, device)
        host.enter_moment("loaded")  # DDP makes its buckets after it
        return held

    with pytest.MonkeyPatch.context() as patch, host:
        patch.setattr(wrapping, "stream_in", loading)
        parallelize(nn.Sequential(model), plan, precision=find_precision("32-true"), device=CPU, mesh=mesh)
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return host.peaks[SETUP].allocated_bytes, sum(p.nbytes for p in parts), max(p.nbytes for p in parts)


@pytest.mark.parametrize("plan", [Plan(dp_shard=2), Plan(dp_replicate=2)], ids=["shards", "replicas"])
def test_f5_the_host_holds_little_more_than_what_is_kept(plan: Plan, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 2000}
    LlamaForCausalLM(llama_config(**sizes)).bfloat16().save_pretrained(tmp_path)
    for peak, share, largest in run_ranks(2, peak_and_share, str(tmp_path), plan):
        assert share <= peak <= share + largest
