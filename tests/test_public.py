"""The public surface: names, a light import, and the strategy names in Lightning's registries."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.checkered import checkered

import lightning_shard

PUBLIC = {
    "AdapterSpec", "AutoShardStrategy", "Cluster", "Decision", "Estimate", "FSDP2Strategy", "ModelSpec", "Plan",
    "TrainSpec", "TunedDDPStrategy", "__version__", "from_pretrained", "grad_norm", "lora", "lora_plus", "plan",
    "stream_weights",
}  # fmt: skip
HEAVY = ("torch", "lightning", "pytorch_lightning", "transformers", "peft", "numpy")
NAMES = {"auto-shard": "AutoShardStrategy", "fsdp2": "FSDP2Strategy", "tuned-ddp": "TunedDDPStrategy"}
TRAINER = "Trainer(accelerator='cpu', devices=1, logger=False, strategy={name!r}).strategy"


def run(*lines: str) -> str:
    """What a fresh Python process prints for these lines."""
    result = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_public_names_are_these() -> None:
    assert set(lightning_shard.__all__) == PUBLIC
    assert set(dir(lightning_shard)) >= PUBLIC
    for name in PUBLIC:
        assert getattr(lightning_shard, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Plann'. Its public names: AdapterSpec"):
        lightning_shard.Plann  # noqa: B018


def test_the_version_is_the_installed_one() -> None:
    from importlib.metadata import version

    assert lightning_shard.__version__ == version("lightning-shard")


def test_types_are_shipped() -> None:
    assert (Path(lightning_shard.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize(
    "line",
    [
        "import lightning_shard",
        "from lightning_shard import AdapterSpec, Cluster, Decision, Estimate, ModelSpec, Plan, TrainSpec, plan",
        "import lightning_shard.testing",
    ],
)
def test_the_import_is_light(line: str) -> None:
    assert run(line, "import sys", f"print([name for name in {HEAVY} if name in sys.modules])") == "[]"


@pytest.mark.parametrize(*checkered(package=["lightning.pytorch", "pytorch_lightning"], ours_first=[True, False]))
def test_a_trainer_finds_the_strategies_by_name(package: str, ours_first: bool) -> None:
    _require(package)
    lines = ["import lightning_shard", f"import {package}"]
    found = run(
        *(lines if ours_first else reversed(lines)),
        f"from {package} import Trainer",
        f"from {package}.strategies import DDPStrategy, StrategyRegistry",
        f"assert set({tuple(NAMES)}) <= set(StrategyRegistry.available_strategies())",
        *(f"strategy = {TRAINER.format(name=name)}; print(type(strategy).__name__)" for name in NAMES),
        "assert isinstance(strategy, DDPStrategy)",
        "import importlib; importlib.reload(lightning_shard)  # registering twice is harmless",
    )
    assert [line for line in found.splitlines() if line in NAMES.values()] == list(NAMES.values())


@pytest.mark.slow
def test_classes_of_the_two_packages_do_not_mix() -> None:
    _require("pytorch_lightning")
    said = run(
        "import lightning_shard, lightning.pytorch",
        "from pytorch_lightning import Trainer",
        "try:",
        f"    {TRAINER.format(name='fsdp2')}",
        "except RuntimeError as error:",
        "    print(error)",
    )
    assert "strategy='fsdp2' was given to a Trainer of pytorch_lightning, but both" in said
    assert "classes of the two packages do not mix. Import everything from lightning.pytorch" in said


def test_an_unknown_strategy_name_is_refused_at_once() -> None:
    from lightning.pytorch import Trainer

    with pytest.raises(ValueError, match=r"invalid strategy name: `strategy='auto-shrad'`"):
        Trainer(accelerator="cpu", devices=2, strategy="auto-shrad")


def _require(package: str) -> None:
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed")
