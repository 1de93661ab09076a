"""Recipes: their sharding types on absent slices, and the figures in their docstrings."""

from __future__ import annotations

import inspect
import json
import os
import random
import subprocess
import sys

import markdown
import pytest

from benchmarks.recipes import ROW, predicted, recipes, topologies
from tests import environment

RECIPES = recipes()
PARAMETERS = {
    "deepseek_v3": 671_026_419_200,
    "gpt2_124m": 124_439_808,
    "llama2_7b": 6_738_415_616,
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_8b_128k": 8_030_261_248,
    "llama3_8b_1m": 8_030_261_248,
    "llama3_8b_1m_node": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mixtral_8x22b": 140_630_071_296,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "sft_smollm2": 134_515_008,
}
"""Of the published models."""
PODS = sorted(name for name, recipe in RECIPES.items() if topologies(recipe))


@pytest.mark.drawn(0.3)
def test_recipes_type_check_within_a_second():
    """The loss of each on its first slice; of one, by the seed, the training step.

    What takes longer, because other work on the machine slows processors too, is traced a second time.
    """
    whole = random.Random(environment.derive(environment.seed(), "recipes")).choice(PODS)
    environ = {**os.environ, "PYTHONPATH": str(environment.ROOT)}
    slow: dict[str, float] = {}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "tests.recipes.types", whole],
            cwd=environment.ROOT, env=environ, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{whole}: {done.stderr}"
        found = json.loads(done.stdout.splitlines()[-1])
        assert set(found) == set(RECIPES)
        assert {name: found[name]["parameters"] for name in PARAMETERS} == PARAMETERS
        slow = {name: row["seconds"] for name, row in found.items() if row["seconds"] > 1}
        if not slow:
            break
    assert not slow, "seconds of CPU time to trace the loss"


@pytest.mark.parametrize("name", PODS)
def test_tables_are_what_the_plan_says(name):
    """To the printed digits; `python -m benchmarks.recipes --write` writes them."""
    recipe = RECIPES[name]
    lines = [found[0] for found in ROW.finditer(recipe.__doc__ or "")]
    for line, on in zip(lines, topologies(recipe), strict=True):
        now = str(predicted(recipe, on))
        for text, right in zip(figures(line), figures(now), strict=True):
            assert (text == "-") == (right == "-"), f"{line}\n{now}"
            if text != "-":
                digit = 10.0 ** -len(text.partition(".")[2])
                assert abs(float(text) - float(right)) < 1.01 * digit, f"{line}\n{now}"


def figures(row: str) -> list[str]:
    """The cells of a row after its topology."""
    return [cell.strip() for cell in row.split("|")[2:-1]]


@pytest.mark.parametrize("name", PODS)
def test_tables_are_tables_on_the_site(name):
    """All their rows, and none that the command above does not see."""
    html = markdown.markdown(inspect.cleandoc(RECIPES[name].__doc__ or ""), extensions=["tables"])
    assert html.count("<table>") == 1
    assert html.count("<tr>") == 1 + len(topologies(RECIPES[name]))


@pytest.mark.parametrize("name", PODS)
def test_what_is_predicted_fits(name):
    """No table offers a slice that the formulas say is too small."""
    for on in topologies(RECIPES[name]):
        row = predicted(RECIPES[name], on)
        assert row.gib < row.of, row
        assert row.compiled is None or row.compiled < row.of, row
