"""Grouped low-rank matmul at the shapes of real models, compiled for absent TPUs and GPUs.

Legend: M rows (tokens of a step), S slots, J pages of the largest adapter, K columns of a row, N columns of the result.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.grouped_lora import PAGE_RANKS, grouped_lora, schedule_tiles
from sharding.isolate import run_isolated
from sharding.topology import Topology

TOPOLOGIES = ("v5e:1x1", "v5p:2x2x1", "v6e:1x1", "tpu7x:2x2x1", "h100:1x2", "b200:1x2")
EXEMPT: dict[tuple[str, str], str] = {}
"""(shape, topology) -> a part of the compiler's reason for refusing it."""
TEMPORARIES = 1.0
"""Bytes of temporaries for each byte of arguments and results: no factor is gathered for a row."""


@dataclass(frozen=True)
class Shape:
    """Shapes of one device's computation; ``rank`` is the largest."""

    m: int
    k: int
    n: int
    slots: int = 32
    rank: int = 64
    dtype: str = "bfloat16"


SHAPES = {
    "Llama-3-8B, decode": Shape(64, 4096, 4096),
    "Llama-3-8B, down, ranks to 256": Shape(512, 14336, 4096, rank=256),
    "Llama-3-70B, an eighth, up": Shape(2048, 8192, 3584),
    "SmolLM2-135M": Shape(16, 576, 1536, rank=16),
    "odd sizes, float32": Shape(77, 301, 203, 5, 48, "float32"),
}
CELLS = tuple((shape, topology) for shape in SHAPES for topology in TOPOLOGIES)


def compile_on(topology: Topology, shape: dict[str, Any]) -> dict[str, float]:
    """In a child process: compiles a ``Shape``; bytes of arguments and results, and of temporaries, of one device."""
    from jaxllm.compiler import aot

    x, n = Shape(**shape), topology.num_devices
    mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Explicit,), devices=topology.devices())
    rows = NamedSharding(mesh, P("data"))
    columns = -(-x.rank // PAGE_RANKS)

    def array(first: int, *rest: int, dtype: Any = x.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((first * n, *rest), dtype, sharding=rows)

    def local(tokens: Any, a: Any, b: Any, slots: Any, tables: Any, scales: Any) -> Any:
        implementation = f"pallas_{topology.platform}"
        return grouped_lora(tokens, a, b, schedule_tiles(slots, tables, scales), implementation=implementation)

    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    pages = x.slots * columns
    arguments = (
        array(x.m, x.k), array(pages, PAGE_RANKS, x.k), array(pages, PAGE_RANKS, x.n), array(x.m, dtype=jnp.int32),
        array(x.slots, columns, dtype=jnp.int32), array(x.slots, dtype=jnp.float32),
    )  # fmt: skip
    report = aot.compile(step, *arguments, topology=topology, mesh=mesh)
    both = report.argument_bytes + report.output_bytes
    return {"bytes": both, "temp_bytes": report.temp_bytes, "seconds": report.compile_seconds}


def compile_cell(shape: str, topology: str) -> dict[str, float]:
    """Compiles a cell in a child process; raises what the compiler says."""
    return run_isolated("tests.kernels.lora_aot:compile_on", topology, {"shape": dataclasses.asdict(SHAPES[shape])})
