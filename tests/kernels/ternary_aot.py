"""Matmul with ternary codes at the shapes of real mixtures, compiled for absent GPUs; TPUs have no kernel for it.

The backward pass decodes the matrices in plain JAX, and is left out.

Legend: M rows, K inputs, N outputs, E experts of a device.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.quant.ternary_code import WORDS
from pallas_kernels.ternary_matmul import TernaryCode, ternary_matmul
from sharding.isolate import run_isolated
from sharding.topology import Topology

TOPOLOGIES = ("h100:1x2", "h200:1x2", "b200:1x2")
EXEMPT: dict[tuple[str, str], str] = {}
"""(shape, topology) -> a part of the compiler's reason for refusing it."""
TEMPORARIES = 0.02
"""Bytes of temporaries for each byte of arguments and results: one dense expert would be more."""


@dataclass(frozen=True)
class Shape:
    """Shapes of one device's computation."""

    m: int
    k: int
    n: int
    experts: int
    dtype: str = "bfloat16"


SHAPES = {
    "Qwen3-30B-A3B, one token": Shape(8, 2048, 768, 128),
    "Mixtral-8x22B, down, 4 tokens": Shape(8, 16384, 6144, 8),
    "Switch-c2048, 16 tokens": Shape(16, 2080, 6144, 64),
    "odd sizes, float32": Shape(7, 301, 203, 5, "float32"),
}
CELLS = tuple((shape, topology) for shape in SHAPES for topology in TOPOLOGIES)
"""(shape, topology)."""


def compile_on(topology: Topology, shape: dict[str, Any]) -> dict[str, float]:
    """In a child process: compiles a ``Shape``; bytes of arguments and results, and of temporaries, of one device."""
    from jaxllm.compiler import aot

    x, n = Shape(**shape), topology.num_devices
    mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Explicit,), devices=topology.devices())

    def array(first: int, *rest: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((first * n, *rest), dtype, sharding=NamedSharding(mesh, P("data")))

    def local(tokens: Any, words: Any, runs: Any, scales: Any, experts: Any) -> Any:
        return ternary_matmul(
            tokens, TernaryCode(words, runs), scales, experts, implementation=f"pallas_{topology.platform}"
        )

    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    words = 2 * x.n + x.k * x.n * 3 // 64  # 0.75 bits a value
    arguments = (
        array(x.m, x.k, dtype=x.dtype), array(x.experts, words, dtype=jnp.uint16),
        array(2, WORDS, dtype=jnp.uint32), array(x.experts, x.n, dtype=jnp.float32), array(x.m, dtype=jnp.int32),
    )  # fmt: skip
    report = aot.compile(step, *arguments, topology=topology, mesh=mesh)
    both = report.argument_bytes + report.output_bytes
    return {"bytes": both, "temp_bytes": report.temp_bytes, "seconds": report.compile_seconds}


def compile_cell(shape: str, topology: str) -> dict[str, float]:
    """Compiles a cell in a child process; raises what the compiler says."""
    return run_isolated("tests.kernels.ternary_aot:compile_on", topology, {"shape": dataclasses.asdict(SHAPES[shape])})
