"""Ring attention of real models, forward and backward, compiled for absent slices and nodes."""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.ring_attention import Layout, ring_attention
from sharding.isolate import run_isolated
from sharding.topology import Topology

TPUS = ("v4:2x2x1", "v5e:2x4", "v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1")
IMPLEMENTATIONS = {"pallas_tpu": TPUS, "xla": (*TPUS, "h100:1x8")}
EXEMPT: dict[tuple[str, ...], str] = {}
"""(shape, implementation, topology) -> a part of the compiler's reason for refusing it."""
TEMPORARIES = 20.0
"""See tests/proofs/kernels/aot.py. Plain JAX holds a block of scores of all queries; those of a whole step would be 25
for Llama-3.1-8B and 28 for gpt-oss-20b."""
_CYCLES = re.compile(r'"?estimated_cycles"?:"(\d+)"')


@dataclass(frozen=True)
class Shape:
    """Shard of one device of the ring; the sequence is split over all devices of a topology."""

    s: int
    n: int
    k: int
    h: int
    layout: Layout = "zigzag"
    v: int | None = None
    b: int = 1
    dtype: str = "bfloat16"
    packed: bool = False
    sinks: bool = False
    window: int | None = None
    softcap: float | None = None


SHAPES = {
    "Llama-3.1-8B, zigzag, packed": Shape(8192, 32, 8, 128, packed=True),
    "Gemma-2-9B, contiguous": Shape(4096, 16, 8, 256, "contiguous", window=4096, softcap=50.0),
    "gpt-oss-20b, striped": Shape(4096, 64, 8, 64, "striped", window=128, sinks=True),
    "DeepSeek-V3, an eighth of the heads, striped": Shape(4096, 16, 16, 192, "striped", v=128, b=2),
    "everything, float32": Shape(
        1002, 6, 2, 96, v=64, b=2, dtype="float32", packed=True, sinks=True, window=999, softcap=30.0
    ),
}
CELLS = tuple(
    (shape, name, topology)
    for shape in SHAPES
    for name, where in IMPLEMENTATIONS.items()
    for topology in where
    if (name, SHAPES[shape].dtype) != ("xla", "float32")  # minutes each: six products for one, block by block
)


def step(
    topology: Topology, x: Shape, implementation: str, shards: int | None = None
) -> tuple[Any, tuple[Any, ...], Any]:
    """In a child process: forward and backward over all devices, what it takes, and the mesh.

    Args:
        shards: how many of the devices the ring has, the others being further rings; default: all.
    """
    n = topology.num_devices
    shards = shards or n
    axes = ("data", "context")
    mesh = jax.make_mesh((n // shards, shards), axes, axis_types=(AxisType.Explicit,) * 2, devices=topology.devices())
    where, everywhere = P("data", "context"), P()

    def array(*sizes: int, dtype: str = x.dtype) -> jax.ShapeDtypeStruct:
        shape = (x.b * (n // shards), x.s * shards, *sizes)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, where))

    arrays = {"q": array(x.n, x.h), "k": array(x.k, x.h), "v": array(x.k, x.v or x.h)}
    specs = dict.fromkeys(arrays, where)
    if x.sinks:
        arrays["sinks"] = jax.ShapeDtypeStruct((x.n,), "float32", sharding=NamedSharding(mesh, everywhere))
        specs["sinks"] = everywhere
    segments = array(dtype="int32") if x.packed else None

    def call(segments: Any, arrays: dict[str, Any]) -> Any:
        attend = functools.partial(
            ring_attention,
            axis="context",
            layout=x.layout,
            window=x.window,
            softcap=x.softcap,
            implementation=implementation,
        )
        return attend(**arrays, segment_ids=segments)

    def both(arrays: dict[str, Any], segments: Any, d_out: Any) -> Any:
        in_specs = where if x.packed else None, specs
        mapped = jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=where)
        out, pull = jax.vjp(functools.partial(mapped, segments), arrays)
        return out, pull(d_out)

    return jax.jit(both), (arrays, segments, array(x.n, x.v or x.h)), mesh


def compile_on(
    topology: Topology, shape: dict[str, Any], implementation: str, shards: int | None = None
) -> dict[str, float]:
    """In a child process: bytes of a device's arguments and results, and of its temporaries."""
    from jaxllm.compiler import aot

    function, arguments, mesh = step(topology, Shape(**shape), implementation, shards)
    report = aot.compile(function, *arguments, topology=topology, mesh=mesh)
    both = report.argument_bytes + report.output_bytes
    return {"bytes": both, "temp_bytes": report.temp_bytes, "seconds": report.compile_seconds}


def compile_cell(shape: str, implementation: str, topology: str) -> dict[str, float]:
    """Compiles a cell in a child process; raises what the compiler says."""
    arguments = {"shape": dataclasses.asdict(SHAPES[shape]), "implementation": implementation}
    return run_isolated("tests.kernels.ring_aot:compile_on", topology, arguments)


def overlap_on(topology: Topology, layout: Layout) -> list[dict[str, float]]:
    """In a child process, of each loop of the plain JAX version that passes keys on: what its copies leave uncovered.

    Returns:
        Of each loop: ``waited``, copies that are not asynchronous; ``uncovered``, the share of the compiler's cycles
        that is not between the last copy's start and the first one's end; ``branches``, computed outside of that.
    """
    function, arguments, mesh = step(topology, Shape(1024, 4, 2, 128, layout), "xla")
    with jax.set_mesh(mesh):
        text = function.lower(*arguments).compile().as_text()
    loops = []
    for computation in text.split("\n\n"):
        if "collective-permute" not in computation or computation.lstrip().startswith("ENTRY"):
            continue
        lines = computation.splitlines()
        starts, ends, branches = (
            [i for i, line in enumerate(lines) if f" {kind}(" in line]
            for kind in ("collective-permute-start", "collective-permute-done", "conditional")
        )
        cycles = [int(found.group(1)) if (found := _CYCLES.search(line)) else 0 for line in lines]
        covered = slice(max(starts, default=0), min(ends, default=0))
        loops.append(
            {
                "waited": sum(" collective-permute(" in line for line in lines),
                "uncovered": 1 - sum(cycles[covered]) / sum(cycles),
                "branches": sum(not covered.start < i < covered.stop for i in branches) if branches else -1,
            }
        )
    return loops
