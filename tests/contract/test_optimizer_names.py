"""Optimizers are rows of a table: nothing outside of ``jaxllm/optim`` compares their names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxllm.optim import OPTIMIZERS
from tests.contract.source_tree import ROOT, parse, sources

CODE = ("jaxllm", "pallas_kernels", "sharding", "recipes", "benchmarks")
HOME = ROOT / "jaxllm" / "optim"


def comparisons(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, source) of what depends on an optimizer's name: comparisons, patterns, lookups, and tuples of names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            kinds = [one for one in parts if isinstance(one, ast.Attribute | ast.Name) and "kind" in ast.unparse(one)]
            inside = {one.value for part in parts for one in ast.walk(part) if isinstance(one, ast.Constant)}
            if (kinds and inside & set(OPTIMIZERS)) or any(ast.unparse(one).endswith("optim.kind") for one in parts):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.MatchValue) and getattr(node.value, "value", None) in OPTIMIZERS:
            yield node.value.lineno, ast.unparse(node)
        elif isinstance(node, ast.Subscript) and ast.unparse(node.slice).endswith("optim.kind"):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            names = [one.value for one in node.elts if isinstance(one, ast.Constant)]
            if names and set(names) <= set(OPTIMIZERS):
                yield node.lineno, ast.unparse(node)


def test_the_count_counts():
    found = """
if run.optim.kind == "adamw" or kind in ("lomo", "adalomo") or optim.kind in STREAMABLE:
    match kind:
        case "sgd":
            pass
NAMES = ("lomo", "mezo")
FIELDS[config.optim.kind]
"""
    assert [line for line, _ in sorted(comparisons(ast.parse(found)))] == [2, 2, 2, 2, 4, 6, 7]
    assert not list(
        comparisons(ast.parse('schedule.kind == "constant"; OptimConfig(kind="muon"); f"{run.optim.kind}"'))
    )


@pytest.mark.parametrize("top", CODE)
def test_no_optimizer_is_compared_by_name(top):
    def outside(path: Path) -> bool:
        return HOME not in path.parents

    problems = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in filter(outside, sources(top))
        for line, text in comparisons(parse(path))
    ]
    assert not problems, "ask the row (OptimConfig.spec), or add a field to OptimizerSpec:\n" + "\n".join(problems)


def test_a_row_names_fields_that_exist():
    from jaxllm.optim.config import OPTIONAL_FIELDS

    for kind, spec in OPTIMIZERS.items():
        assert spec.fields <= set(OPTIONAL_FIELDS), kind
        assert bool(spec.refresh) == ("refresh" in spec.fields), kind
