"""Fused mixture of experts at the shapes of real models, compiled for absent TPUs.

Legend: T tokens of a decode step, A experts per token, E experts, D embed, F width of an expert.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.fused_moe import fused_moe
from sharding.isolate import run_isolated
from sharding.topology import Topology

TOPOLOGIES = ("v5e:1x1", "v5p:2x2x1", "v6e:1x1", "tpu7x:2x2x1")
EXEMPT: dict[tuple[str, str], str] = {}
"""(shape, topology) -> a part of the compiler's reason for refusing it."""
TEMPORARIES = 0.5
"""Bytes of temporaries for each byte of arguments and results: matrices of odd sizes are copied to whole tiles."""


@dataclass(frozen=True)
class Shape:
    """Shapes of one device's computation."""

    t: int
    a: int
    e: int
    d: int
    f: int
    dtype: str = "bfloat16"


SHAPES = {
    "Mixtral 8x7B, width over 8": Shape(64, 2, 8, 4096, 14336 // 8),
    "Mixtral 8x7B, width over 4": Shape(16, 2, 8, 4096, 14336 // 4),
    "Qwen3-30B-A3B": Shape(128, 8, 128, 2048, 768),
    "DeepSeek-V3, width over 8": Shape(32, 8, 256, 7168, 256),
    "OLMoE": Shape(100, 8, 64, 2048, 1024),
    "odd sizes, float32": Shape(21, 3, 7, 301, 203, "float32"),
}
CELLS = tuple((shape, topology) for shape in SHAPES for topology in TOPOLOGIES)


def compile_on(topology: Topology, shape: dict[str, Any]) -> dict[str, float]:
    """In a child process: compiles a ``Shape``; bytes of arguments and results, and of temporaries, of one device."""
    from jaxllm.compiler import aot

    one, n = Shape(**shape), topology.num_devices
    mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Explicit,), devices=topology.devices())
    rows = NamedSharding(mesh, P("data"))

    def array(first: int, *rest: int, dtype: Any = one.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((first * n, *rest), dtype, sharding=rows)

    def local(*arrays: Any) -> Any:
        return fused_moe(*arrays, jax.nn.silu, implementation="pallas_tpu")

    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    arguments = (
        array(one.t, one.d), array(one.e, one.d, one.f), array(one.e, one.d, one.f), array(one.e, one.f, one.d),
        array(one.t, one.a, dtype=jnp.int32), array(one.t, one.a, dtype=jnp.float32),
    )  # fmt: skip
    report = aot.compile(step, *arguments, topology=topology, mesh=mesh)
    both = report.argument_bytes + report.output_bytes
    return {"bytes": both, "temp_bytes": report.temp_bytes, "seconds": report.compile_seconds}


def compile_cell(shape: str, topology: str) -> dict[str, float]:
    """Compiles a cell in a child process; raises what the compiler says."""
    return run_isolated(
        "tests.kernels.fused_moe_aot:compile_on", topology, {"shape": dataclasses.asdict(SHAPES[shape])}
    )
