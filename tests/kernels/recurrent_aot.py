"""Head-wise recurrent network at the shapes of models, forward and backward, compiled for absent TPUs and GPUs.

Legend: B rows of a device, S sequence, N heads, H head dim.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.recurrent import recurrent
from pallas_kernels.recurrent.cells import CELLS as KINDS
from sharding.isolate import run_isolated
from sharding.topology import Topology

TOPOLOGIES = ("v5e:1x1", "v5p:2x2x1", "v6e:1x1", "h100:1x2")


@dataclass(frozen=True)
class RecurrentShape:
    """Shapes of one device's computation."""

    cell: str
    b: int
    s: int
    n: int
    h: int
    dtype: str = "bfloat16"


SHAPES = {
    "sLSTM, 16 rows": RecurrentShape("slstm", 16, 1024, 4, 128),
    "LSTM, many heads, one row": RecurrentShape("lstm", 1, 2048, 12, 64),
    "GRU, float32, odd sizes": RecurrentShape("gru", 27, 301, 3, 32, "float32"),
    "sLSTM of wide heads": RecurrentShape("slstm", 32, 512, 2, 256),
}
EXEMPT: dict[tuple[str, str], str] = {
    ("sLSTM of wide heads", "h100:1x2"): "KiB of recurrent matrices of a head at most"
}
"""(shape, topology) -> a part of the reason why the kernel refuses it."""
TEMPORARIES = 7.0
"""Bytes of temporaries for each byte of arguments and results: copies in the order of the kernels, and float32 states.
For a head dim of 32, which tiles of 128 lanes hold four times as large, 10 arrays of [B S N H] are copied (the gate
inputs, the states, hidden states and their gradients, the gradients of gates) beside 6 that go in and out: 40 / 6.
"""
CELLS = tuple((shape, topology) for shape in SHAPES for topology in TOPOLOGIES)


def compile_on(topology: Topology, shape: dict[str, Any]) -> dict[str, float]:
    """In a child process: compiles a ``RecurrentShape``; bytes of arguments and results, and of temporaries."""
    from jaxllm.compiler import aot

    x, n = RecurrentShape(**shape), topology.num_devices
    mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Explicit,), devices=topology.devices())
    gates = len(KINDS[x.cell].gates)

    def array(spec: P, *dims: int, dtype: Any = x.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    def local(gates: Any, matrices: Any, bias: Any, resets: Any) -> Any:
        out, _ = recurrent(
            gates,
            matrices,
            bias,
            cell=x.cell,  # type: ignore[arg-type]
            resets=resets,
            implementation=f"pallas_{topology.platform}",
        )
        return out

    rows = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P(), P(), P("data")), out_specs=P("data"))

    def loss(gates: Any, matrices: Any, bias: Any, resets: Any) -> Any:
        return jnp.sum(rows(gates, matrices, bias, resets).astype(jnp.float32) ** 2)

    arguments = (
        array(P("data"), x.b * n, x.s, x.n, gates, x.h),
        array(P(), x.n, gates, x.h, x.h),
        array(P(), x.n, gates, x.h),
        array(P("data"), x.b * n, x.s, dtype=jnp.bool_),
    )
    report = aot.compile(jax.jit(jax.grad(loss, (0, 1, 2))), *arguments, topology=topology, mesh=mesh)
    both = report.argument_bytes + report.output_bytes
    return {"bytes": both, "temp_bytes": report.temp_bytes, "seconds": report.compile_seconds}


def compile_cell(shape: str, topology: str) -> dict[str, float]:
    """Compiles a cell in a child process; raises what the compiler says."""
    shape_fields = dataclasses.asdict(SHAPES[shape])
    return run_isolated("tests.kernels.recurrent_aot:compile_on", topology, {"shape": shape_fields})
