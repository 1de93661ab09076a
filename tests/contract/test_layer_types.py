"""Layers say their own costs: nothing outside of ``jaxllm/models`` asks which kind of layer a configuration is."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from jaxllm.models.layers.layer_table import ATTENTION_LAYERS, FEED_FORWARD_LAYERS
from tests.contract.source_tree import ROOT, parse, sources

CODE = ("jaxllm", "pallas_kernels", "sharding", "recipes", "benchmarks")
HOME = ROOT / "jaxllm" / "models"


def questions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, source) of ``isinstance`` and ``type(...) is`` about a row of the layer tables or its module."""
    names = {row.__name__ for row in (*ATTENTION_LAYERS, *FEED_FORWARD_LAYERS)}
    names |= {"Attention", "MultiHeadLatentAttention", "Mlp", "Moe"}
    for node in ast.walk(tree):
        asks = isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass")
        asks |= isinstance(node, ast.Compare) and "type(" in ast.unparse(node)
        if asks and names & {one.split(".")[-1] for n in ast.walk(node) for one in [ast.unparse(n)]}:  # type: ignore[arg-type]
            yield node.lineno, ast.unparse(node)  # type: ignore[attr-defined]


def test_the_count_counts():
    found = (
        "isinstance(b.mlp, MoeConfig)\nisinstance(a, (models.MLAConfig, int))\ntype(x) is MlpConfig\nisinstance(a, int)"
    )
    assert [line for line, _ in questions(ast.parse(found))] == [1, 2, 3]


def test_no_layer_is_asked_for_its_type():
    problems = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sources(*CODE)
        if HOME not in path.parents
        for line, text in questions(parse(path))
    ]
    assert not problems, "ask the layer (jaxllm/models/layers/layer.py):\n" + "\n".join(problems)
