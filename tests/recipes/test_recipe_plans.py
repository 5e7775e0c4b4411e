"""Every recipe is planned from its model's config.json, and its header says what comes of it."""

from pathlib import Path

import pytest
from recipe_plans import LINE, RECIPES, decide, read

PLANNED = [(recipe, match) for recipe in RECIPES for match in LINE.finditer(recipe.read_text())]
FAST = {"smollm2_135m_lora", "llama3_1_8b_lora", "pretrain_llama_100m", "vit_classification"}


def slow_unless_fast(recipe: Path) -> tuple[pytest.MarkDecorator, ...]:
    return () if recipe.stem in FAST else (pytest.mark.slow,)


@pytest.mark.parametrize(
    ("recipe", "devices", "device", "strategy", "gib", "micro"),
    [
        pytest.param(recipe, *match.groups(), id=f"{recipe.stem}-{match[1]}x{match[2]}", marks=slow_unless_fast(recipe))
        for recipe, match in PLANNED
    ],
)
def test_the_header_says_what_the_planner_says(
    recipe: Path, devices: str, device: str, strategy: str, gib: str, micro: str
) -> None:
    """Within a fifth: estimates move as they get better. ``python tests/recipes/recipe_plans.py`` writes them anew."""
    size, decision = decide(recipe, int(devices), device)
    assert decision.fits, decision.reason
    assert decision.plan.strategy == strategy
    assert decision.estimate.device_bytes / 2**30 == pytest.approx(float(gib), rel=0.2)
    assert size in (int(micro) // 2, int(micro), int(micro) * 2)
    rows = read(recipe)["data"]["global_batch_size"]
    assert rows % (size * int(devices)) == 0


def test_every_recipe_but_the_quickstart_is_planned() -> None:
    assert {recipe.stem for recipe, _ in PLANNED} == {recipe.stem for recipe in RECIPES} - {"quickstart"}
