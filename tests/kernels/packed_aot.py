"""Packed matmul at the shapes of real models, compiled for absent TPUs and GPUs.

The backward pass multiplies with the dequantised matrix in plain JAX, and is left out.

Legend: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.packed_matmul import PackedCodes, packed_matmul
from pallas_kernels.packed_matmul.check_samples import LEVELS
from pallas_kernels.packed_matmul.scales import EXTRA
from sharding.isolate import run_isolated
from sharding.topology import Topology

TOPOLOGIES = ("v4:2x2x1", "v5e:1x1", "v5p:2x2x1", "v6e:1x1", "tpu7x:2x2x1", "h100:1x2", "b200:1x2")
EXEMPT: dict[tuple[str, str], str] = {}
"""(shape, topology) -> a part of the compiler's reason for refusing it."""

TEMPORARIES = 2.0
"""Bytes of temporaries for each byte of arguments and results: activations are split by lanes. With few rows the
dequantised matrix would be four of them."""


@dataclass(frozen=True)
class Shape:
    """Shapes of one device's computation; ``group`` inputs share a scale, 0: all; ``block`` scales a block, 0: none."""

    m: int
    k: int
    n: int
    group: int = 128
    bits: int = 4
    table: bool = False
    dtype: str = "bfloat16"
    exponents: bool = False
    wide: bool = False
    block: int = 0
    by_row: bool = False


SHAPES = {
    "Llama-3-8B, one row": Shape(1, 4096, 14336),
    "Llama-3-8B, down, 128 rows": Shape(128, 14336, 4096),
    "Llama-3-8B, prefill": Shape(2048, 4096, 4096),
    "Llama-3-70B, an eighth, a table": Shape(16, 8192, 3584, table=True),
    "Qwen3-0.6B, int8 by channel": Shape(16, 1024, 3072, 0, 8),
    "SmolLM2-135M, groups of 64": Shape(16, 576, 1536, 64),
    "Llama-3-8B, MXFP4": Shape(1, 4096, 14336, 32, table=True, exponents=True),
    "Llama-3-8B, a table of 3 bits": Shape(1, 14336, 4096, 64, 3, table=True),
    "Llama-3-8B, int8 activations": Shape(16, 4096, 14336, 32, wide=True),
    "Llama-3-8B, outlier columns": Shape(2, 14336, 4096, 0, 8, wide=True),
    "Llama-3-8B, NF4": Shape(1, 4096, 14336, 64, table=True, block=256),
    "Llama-3-8B, an int8 head by row": Shape(16, 4096, 128256, 0, 8, wide=True, by_row=True),
    "odd outputs, float32": Shape(77, 1536, 203, 32, dtype="float32"),
}
CELLS = tuple(
    (name, topology)
    for name, shape in SHAPES.items()
    for topology in TOPOLOGIES
    if topology[0] not in "vt" or not shape.by_row
)
"""(shape, topology). Rows are for GPUs alone: a TPU would transpose them."""


def compile_on(topology: Topology, shape: dict[str, Any]) -> dict[str, float]:
    """In a child process: compiles a ``Shape``; bytes of arguments and results, and of temporaries, of one device."""
    from jaxllm.compiler import aot

    x, n = Shape(**shape), topology.num_devices
    form = PackedCodes(x.bits, LEVELS[: 2**x.bits] if x.table else None, x.wide, x.by_row)
    mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Explicit,), devices=topology.devices())
    rows = NamedSharding(mesh, P("data"))

    def array(first: int, second: int, dtype: Any = x.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((first * n, second), dtype, sharding=rows)

    def local(tokens: Any, packed: Any, scales: Any) -> Any:
        return packed_matmul(tokens, packed, scales, form, implementation=f"pallas_{topology.platform}")

    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    stored = x.n + (EXTRA * x.n // x.block if x.block else 0)
    shapes = [(x.k // form.lanes * form.bytes, x.n), (x.k // (x.group or x.k), stored)]
    matrix, scales = (shape[::-1] if x.by_row else shape for shape in shapes)
    kind = jnp.uint8 if x.exponents or x.block else jnp.float32
    arguments = array(x.m, x.k), array(*matrix, jnp.uint8), array(*scales, kind)
    report = aot.compile(step, *arguments, topology=topology, mesh=mesh)
    both = report.argument_bytes + report.output_bytes
    return {"bytes": both, "temp_bytes": report.temp_bytes, "seconds": report.compile_seconds}


def compile_cell(shape: str, topology: str) -> dict[str, float]:
    """Compiles a cell in a child process; raises what the compiler says."""
    return run_isolated("tests.kernels.packed_aot:compile_on", topology, {"shape": dataclasses.asdict(SHAPES[shape])})
