"""Matmuls of serving, compiled for a TPU: a layer's weight is multiplied where it lies in the stack of layers."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sharding
from jaxllm.compiler import aot
from sharding import MeshSpec
from sharding.isolate import run_isolated
from sharding.rules import DEFAULT
from sharding.topology import Topology

HEADS, HEAD_DIM, EMBED, LAYERS, ROWS = 32, 128, 4096, 3, 64


def weights_copied(topology: Topology) -> list[str]:
    """Arrays of one layer's weight that the program copies out of the stack of output projections.

    In this process, which must be set up for the topology's compiler.
    """

    def run(stack: Any, x: Any) -> Any:
        with sharding.use_rules(dataclasses.replace(DEFAULT, keep_heads=True)):
            return jax.lax.scan(layer, x, stack)[0]

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return sharding.project(x.reshape(1, ROWS, HEADS, HEAD_DIM), w, (None,) * 3, contract=2), None

    mesh = MeshSpec.parse("tensor=1").build(topology.devices())
    stack, x = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P()))
        for shape in ((LAYERS, HEADS, HEAD_DIM, EMBED), (1, ROWS, EMBED))
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.json"
        aot.compile(jax.jit(run), stack, x, topology=topology, mesh=mesh, keep=file)
        text, _ = aot.kept(file)
    assert "dot_general" in text
    return re.findall(rf"bf16\[(?:1,)?(?:{HEADS},{HEAD_DIM}|{HEADS * HEAD_DIM}),{EMBED}\]\S*S\(1\)\S* fusion", text)


@pytest.mark.drawn(0.5)
def test_an_output_projection_is_multiplied_where_it_lies():
    """As a matrix it would be copied to vector memory first, at three times the cycles of reading it."""
    assert not run_isolated(f"{__name__}:{weights_copied.__name__}", "v6e:1x1", {})
