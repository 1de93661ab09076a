"""Grouped matmul of real models, forward and backward, compiled for absent TPUs and GPUs.

Legend: M rows (tokens times experts of each), E experts, K columns of a row, N columns of the result.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.grouped_matmul import grouped_matmul
from sharding.isolate import run_isolated
from sharding.topology import Topology

TOPOLOGIES = ("v4:2x2x1", "v5e:1x1", "v5p:2x2x1", "v6e:1x1", "tpu7x:2x2x1", "h100:1x2", "b200:1x2")
EXEMPT: dict[tuple[str, str], str] = {}
"""(shape, topology) -> a part of the compiler's reason for refusing it."""
TEMPORARIES = 0.5
"""Bytes of temporaries for each byte of arguments and results: no row is held per group, no matrix is copied."""


@dataclass(frozen=True)
class Shape:
    """Shapes of one device's computation."""

    m: int
    e: int
    k: int
    n: int
    dtype: str = "bfloat16"


SHAPES = {
    "Mixtral-8x22B, up": Shape(16384, 8, 6144, 16384),
    "Mixtral-8x22B, down": Shape(16384, 8, 16384, 6144),
    "Qwen3-30B-A3B, up": Shape(65536, 128, 2048, 768),
    "Qwen3-30B-A3B, down": Shape(65536, 128, 768, 2048),
    "DeepSeek-V3, an eighth of the experts, up": Shape(65536, 32, 7168, 2048),
    "DeepSeek-V3, an eighth of the experts, down": Shape(65536, 32, 2048, 7168),
    "gpt-oss-20b": Shape(16384, 32, 2880, 2880),
    "decode, Qwen3-30B-A3B": Shape(256, 128, 2048, 768),
    "odd sizes, float32": Shape(1001, 5, 301, 203, "float32"),
}
CELLS = tuple((shape, topology) for shape in SHAPES for topology in TOPOLOGIES)


def compile_on(topology: Topology, shape: dict[str, Any], implementation: str = "") -> dict[str, float]:
    """In a child process: compiles a ``Shape``; bytes of arguments and results, and of temporaries, of one device.

    Without a name, the implementation is the platform's ``pallas`` kernel.
    """
    from jaxllm.compiler import aot

    x, n = Shape(**shape), topology.num_devices
    mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Explicit,), devices=topology.devices())
    rows = NamedSharding(mesh, P("data"))
    implementation = implementation or f"pallas_{topology.platform}"

    def array(first: int, *rest: int, dtype: str = x.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((first * n, *rest), dtype, sharding=rows)

    def gradients(lhs: Any, rhs: Any, sizes: Any, d_out: Any) -> Any:
        out, pull = jax.vjp(lambda a, b: grouped_matmul(a, b, sizes, implementation=implementation), lhs, rhs)
        return out, *pull(d_out)

    step = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    arguments = array(x.m, x.k), array(x.e, x.k, x.n), array(x.e, dtype="int32"), array(x.m, x.n)
    report = aot.compile(step, *arguments, topology=topology, mesh=mesh)
    both = report.argument_bytes + report.output_bytes
    return {"bytes": both, "temp_bytes": report.temp_bytes, "seconds": report.compile_seconds}


def compile_cell(shape: str, topology: str) -> dict[str, float]:
    """Compiles a cell in a child process; raises what the compiler says."""
    return run_isolated("tests.kernels.grouped_aot:compile_on", topology, {"shape": dataclasses.asdict(SHAPES[shape])})
