"""Parameter counts from a config.json alone are exact, and a spec survives JSON."""

import json
from pathlib import Path

import pytest
from hand_specs import LLAMA_8B, LLAMA_70B

from lightning_shard.specs import AdapterSpec, ModelSpec

CONFIGS = Path(__file__).parent / "configs"
COUNTS = {  # published by the models' authors, or counted on the live models
    "llama-3.1-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008,
    "mistral-7b": 7_241_732_096,
    "qwen3-0.6b": 596_049_920,
    "gpt2": 124_439_808,
    "bert-base": 109_514_298,
    "t5-small": 60_506_624,
    "vit-base": 86_567_656,
    "mixtral-8x7b": 46_702_792_704,
}
BLOCKS = {"llama-3.1-8b": 32, "llama-3-70b": 80, "gpt2": 12, "bert-base": 12, "t5-small": 12, "vit-base": 12}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_exact(name: str, tmp_path: Path) -> None:
    spec = ModelSpec.from_pretrained(CONFIGS / name)
    assert spec.num_parameters == COUNTS[name]
    assert spec.num_trainable == COUNTS[name]
    assert spec.num_blocks == BLOCKS.get(name, spec.num_blocks) > 1
    assert spec.warnings == ()
    spec.save(tmp_path / "spec.json")
    assert ModelSpec.load(tmp_path / "spec.json") == spec
    assert ModelSpec.from_pretrained(tmp_path / "spec.json") == spec


def test_the_config_alone_is_enough() -> None:
    assert [path.name for path in (CONFIGS / "llama-3.1-8b").iterdir()] == ["config.json"]


def test_equal_blocks_are_stored_once() -> None:
    spec = ModelSpec.from_pretrained(CONFIGS / "llama-3-70b")
    assert [(unit.kind, unit.count) for unit in spec.units] == [
        ("block", 80),
        ("embedding", 1),
        ("head", 1),
        ("root", 1),
    ]
    assert len(json.dumps(spec.to_dict())) < 10_000


def test_hand_written_specs_agree_with_transformers() -> None:
    for hand, name in ((LLAMA_8B, "llama-3.1-8b"), (LLAMA_70B, "llama-3-70b")):
        spec = ModelSpec.from_pretrained(CONFIGS / name)
        assert [unit.names for unit in spec.units] == [unit.names for unit in hand.units]
        assert spec.architecture is not None
        assert hand.architecture is not None
        for field in ("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "norm", "gated_mlp", "rotary_dim"):
            assert getattr(spec.architecture, field) == getattr(hand.architecture, field)


def test_tied_weights_count_once() -> None:
    spec = ModelSpec.from_pretrained(CONFIGS / "qwen3-0.6b")
    assert spec.tied == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert not [unit for unit in spec.units if unit.kind == "head"]


@pytest.mark.parametrize(
    ("targets", "trainable"),
    [
        (("q_proj", "v_proj"), 32 * 16 * (4096 + 4096 + 4096 + 1024)),
        ("all-linear", 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))),
    ],
)
def test_adapter_counts(targets: object, trainable: int) -> None:
    adapted = LLAMA_8B.with_adapter(AdapterSpec(r=16, target_modules=targets))
    assert adapted.num_trainable == trainable
    assert adapted.num_parameters == LLAMA_8B.num_parameters + trainable
    assert ModelSpec.from_dict(json.loads(json.dumps(adapted.to_dict()))) == adapted


def test_dora_adds_a_magnitude_per_output() -> None:
    lora = LLAMA_8B.with_adapter(AdapterSpec(r=8, target_modules=("q_proj",)))
    dora = LLAMA_8B.with_adapter(AdapterSpec(r=8, target_modules=("q_proj",), method="dora"))
    assert dora.num_trainable - lora.num_trainable == 32 * 4096


def test_modules_to_save_train_a_copy() -> None:
    kept = LLAMA_8B.with_adapter(AdapterSpec(r=8, target_modules=("q_proj",), modules_to_save=("lm_head",)))
    plain = LLAMA_8B.with_adapter(AdapterSpec(r=8, target_modules=("q_proj",)))
    assert kept.num_trainable - plain.num_trainable == 128256 * 4096


def test_a_target_that_matches_nothing_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"target_modules=\('query',\) matches no module of llama-3.1-8b.*q_proj"):
        LLAMA_8B.with_adapter(AdapterSpec(target_modules=("query",)))


def test_a_second_adapter_is_refused() -> None:
    adapted = LLAMA_8B.with_adapter(AdapterSpec())
    with pytest.raises(ValueError, match="already has an adapter"):
        adapted.with_adapter(AdapterSpec())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "There is no model at"),
        ("", "has no config.json"),
        ("{ half", "not readable as JSON"),
        ("{}", "names no model_type"),
        ('{"model_type": "llama"}', "gives no hidden size"),
        ('{"model_type": "llama", "hidden_size": 64}', "gives no number of layers"),
        ('{"model_type": "llama", "hidden_size": -1, "num_hidden_layers": 2}', "not positive"),
        ('{"model_type": "no-such", "hidden_size": 8, "num_hidden_layers": 2}', "cannot be read"),
    ],
)
def test_bad_models_say_what_is_wrong(content: str | None, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if content is not None:
        folder.mkdir()
        if content:
            (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_pretrained(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "no 'format'"),
        ('{"format": 99}', "format 99, this version reads 1"),
        ('{"format": 1, "name": "x"}', "not complete"),
        ("{", "not readable"),
    ],
)
def test_bad_specs_say_what_is_wrong(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        ModelSpec.load(path)
