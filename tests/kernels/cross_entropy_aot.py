"""Linear cross-entropy of real models, forward and backward, compiled for absent TPUs and GPUs.

Legend: T tokens, D embed, V vocab.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.cross_entropy import linear_cross_entropy
from sharding.isolate import run_isolated
from sharding.topology import Topology

TOPOLOGIES = ("v4:2x2x1", "v5e:1x1", "v5p:2x2x1", "v6e:1x1", "tpu7x:2x2x1", "h100:1x2", "b200:1x2")
EXEMPT: dict[tuple[str, str], str] = {
    ("Llama-3.3-70B, vocabulary split", "v4:2x2x1"): "do not fit into the fast memory of TPU v4",
}
"""(shape, topology) -> a part of the compiler's reason for refusing it."""
TEMPORARIES = 2.5
"""Bytes of temporaries for each byte of arguments and results, which a few tokens of a small model may need padded and
in float32. That they do not grow as the logits do, ``growth`` says."""


@dataclass(frozen=True)
class Shape:
    """Shapes of one device's computation."""

    t: int
    v: int
    d: int
    dtype: str = "bfloat16"
    softcap: float | None = None
    z_loss: float = 0.0
    split: bool = False  # the vocabulary over the devices, of which each has ``v``


SHAPES = {
    "Llama-3.1-8B": Shape(16384, 128256, 4096),
    "Llama-3.3-70B, vocabulary split": Shape(8192, 16032, 8192, split=True),
    "Gemma-2-9B": Shape(8192, 256000, 3584, softcap=30.0),
    "Qwen3-30B-A3B": Shape(16384, 151936, 2048, z_loss=1e-4),
    "SmolLM2-135M": Shape(32768, 49152, 576),
    "odd sizes, float32": Shape(1001, 5003, 301, "float32", softcap=30.0, z_loss=1e-4),
}
CELLS = tuple((shape, topology) for shape in SHAPES for topology in TOPOLOGIES)


def compile_on(topology: Topology, shape: dict[str, Any]) -> dict[str, float]:
    """In a child process: compiles a ``Shape``; bytes of arguments and results, and of temporaries, of one device."""
    from jaxllm.compiler import aot

    x, n = Shape(**shape), topology.num_devices
    mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Explicit,), devices=topology.devices())
    tokens = P() if x.split else P("data")
    head = P("data") if x.split else P()
    options = {"softcap": x.softcap, "z_loss": x.z_loss, "implementation": f"pallas_{topology.platform}"}

    def array(spec: P, dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        first = shape[0] * n if spec else shape[0]
        return jax.ShapeDtypeStruct((first, *shape[1:]), dtype, sharding=NamedSharding(mesh, spec))

    def loss(hidden: Any, head_rows: Any, targets: Any, weights: Any) -> Any:
        def local(*arrays: Any) -> Any:
            value, _ = linear_cross_entropy(*arrays, vocab_axis="data" if x.split else None, **options)
            return value if x.split else jax.lax.psum(value, "data")

        specs = tokens, head, tokens, tokens
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(hidden, head_rows, targets, weights)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    wide = array(tokens, x.dtype, x.t, x.d), array(head, x.dtype, x.v, x.d)
    per_token = (array(tokens, dtype, x.t) for dtype in ("int32", "float32"))
    report = aot.compile(step, *wide, *per_token, topology=topology, mesh=mesh)
    both = report.argument_bytes + report.output_bytes
    return {"bytes": both, "temp_bytes": report.temp_bytes, "seconds": report.compile_seconds}


def compile_cell(shape: str, topology: str) -> dict[str, float]:
    """Compiles a cell in a child process; raises what the compiler says."""
    return run_isolated(
        "tests.kernels.cross_entropy_aot:compile_on", topology, {"shape": dataclasses.asdict(SHAPES[shape])}
    )


def growth(topology: str) -> float:
    """Bytes of temporaries of twice the tokens and twice the vocabulary beyond twice those of once, over all logits'.

    Logits in memory would make it a half.
    """
    small = Shape(4096, 32768, 512)
    double = dataclasses.replace(small, t=2 * small.t, v=2 * small.v)
    once, twice = (
        run_isolated("tests.kernels.cross_entropy_aot:compile_on", topology, {"shape": dataclasses.asdict(shape)})
        for shape in (small, double)
    )
    return max(0.0, twice["temp_bytes"] - 2 * once["temp_bytes"]) / (4 * double.t * double.v)
