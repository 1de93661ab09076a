"""Flash attention of real models, forward and backward, compiled for absent TPUs and GPUs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.flash_attention import flash_attention
from sharding.isolate import run_isolated
from sharding.topology import Topology

TOPOLOGIES = ("v4:2x2x1", "v5e:1x1", "v5p:2x2x1", "v6e:1x1", "tpu7x:2x2x1", "h100:1x2", "b200:1x2")
EXEMPT: dict[tuple[str, str], str] = {}
"""(shape, topology) -> a part of the compiler's reason for refusing it."""


@dataclass(frozen=True)
class Shape:
    """Shapes of one device's computation; the batch is split over the devices."""

    s: int
    n: int
    k: int
    h: int
    v: int | None = None
    b: int = 1
    t: int | None = None
    dtype: str = "bfloat16"
    packed: bool = False
    positions: bool = False
    sinks: bool = False
    window: int | None = None
    softcap: float | None = None
    kernel: str | None = None  # implementation, where it is not the platform's first


SHAPES = {
    "Llama-3.1-8B, packed": Shape(8192, 32, 8, 128, packed=True),
    "Llama-3.3-70B, an eighth of the heads": Shape(4096, 8, 1, 128, b=2),
    "Mistral-7B, 32k": Shape(32768, 32, 8, 128, window=4096),
    "Gemma-2-9B": Shape(8192, 16, 8, 256, window=4096, softcap=50.0),
    "Gemma-3-1B": Shape(4096, 4, 1, 256, b=2, window=512, packed=True),
    "gpt-oss-20b": Shape(4096, 64, 8, 64, window=128, sinks=True),
    "DeepSeek-V3, an eighth of the heads": Shape(4096, 16, 16, 192, v=128),
    "Phi-3-mini": Shape(4096, 32, 32, 96),
    "Phi-2": Shape(2048, 32, 32, 80),
    "SmolLM2-135M, odd length, float32": Shape(1001, 9, 3, 64, b=2, dtype="float32", packed=True),
    "prefill by positions": Shape(777, 32, 8, 128, t=5001, packed=True, positions=True),
    "decode": Shape(1, 32, 8, 128, b=8, t=8192, positions=True),
    "everything, float32": Shape(
        1500,
        16,
        1,
        256,
        v=128,
        t=2500,
        dtype="float32",
        packed=True,
        positions=True,
        sinks=True,
        window=999,
        softcap=30.0,
    ),
}
CELLS = tuple((shape, topology) for shape in SHAPES for topology in TOPOLOGIES)


def compile_on(topology: Topology, shape: dict[str, Any]) -> dict[str, float]:
    """In a child process: compiles a ``Shape``; bytes of arguments and results, and of temporaries."""
    from jaxllm.compiler import aot

    x, n = Shape(**shape), topology.num_devices
    mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Explicit,), devices=topology.devices())
    rows = NamedSharding(mesh, P("data"))

    def array(*shape: int, dtype: str = x.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((x.b * n, *shape), dtype, sharding=rows)

    t = x.t or x.s
    qkv = array(x.s, x.n, x.h), array(t, x.k, x.h), array(t, x.k, x.v or x.h)
    extra = {}
    for given, name in ((x.packed, "segment_ids"), (x.positions, "positions")):
        if given:
            extra |= {f"{side}_{name}": array(length, dtype="int32") for side, length in (("q", x.s), ("kv", t))}
    implementation = x.kernel or f"pallas_{topology.platform}"

    def gradients(qkv: Any, d_out: Any, extra: Any) -> Any:
        arrays = (*qkv, jnp.arange(x.n, dtype=jnp.float32)) if x.sinks else qkv

        def call(q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
            options = {"window": x.window, "softcap": x.softcap, "implementation": implementation}
            return flash_attention(q, k, v, sinks=sinks, **extra, **options)

        out, pull = jax.vjp(call, *arrays)
        return out, pull(d_out)[:3]

    step = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    report = aot.compile(step, qkv, array(x.s, x.n, x.v or x.h), extra, topology=topology, mesh=mesh)
    both = report.argument_bytes + report.output_bytes
    return {"bytes": both, "temp_bytes": report.temp_bytes, "seconds": report.compile_seconds}


def compile_cell(shape: str, topology: str) -> dict[str, float]:
    """Compiles a cell in a child process; raises what the compiler says."""
    return run_isolated("tests.kernels.flash_aot:compile_on", topology, {"shape": dataclasses.asdict(SHAPES[shape])})
