"""Small programs whose collectives can be counted by hand, compiled in a child process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.compiler import aot, collectives, live_ranges, program_walker
from jaxllm.compiler.replica_groups import Placement
from sharding import MeshSpec
from sharding.topology import Topology

ROWS, COLUMNS = 256, 1024
"""A float32 array of this size is split over the 8 devices of a mesh of data=2, tensor=4."""


def mesh_of(topology: Topology) -> Mesh:
    """The mesh of these programs."""
    return MeshSpec.parse("data=2,tensor=4").build(topology.devices())


def manual(mesh: Mesh, spec: P, out: P | None = None) -> Callable[[Callable], Callable]:
    """Runs a function on each device's own part."""

    def wrap(function: Callable) -> Callable:
        return jax.shard_map(
            function, mesh=mesh, in_specs=spec, out_specs=spec if out is None else out, check_vma=False
        )

    return wrap


def repeat(times: int, body: Callable) -> Callable:
    """``body`` in a scan of ``times`` turns."""
    return lambda x: jax.lax.scan(lambda c, _: (body(c), None), x, None, length=times)[0]


def programs(mesh: Mesh) -> dict[str, tuple[Callable, P]]:
    """Functions of one array and how it comes in: split over data, or over both axes."""
    rows, all_rows = P("data"), P(("data", "tensor"))
    ring = [(i, (i + 1) % 4) for i in range(4)]

    def psum(x):
        return jax.lax.psum(x, "tensor")

    def shift(x):
        return jax.lax.ppermute(x, "tensor", ring)

    def sine(x):
        """On TPUs by a kernel with metadata, which the compiler prints on lines of its own."""

        def kernel(x_ref, out_ref):
            out_ref[...] = jnp.sin(x_ref[...])

        if mesh.devices.flat[0].platform != "tpu":
            return jnp.sin(x)
        return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), metadata={"mesh_axes": "tensor"})(x)

    def scatter_and_gather(x):
        part = jax.lax.psum_scatter(x, "tensor", tiled=True)
        return jax.lax.all_gather(jnp.sin(part), "tensor", tiled=True)

    def countdown(x):
        def turn(state):
            i, x = state
            return i - 2, jnp.sin(psum(x))

        return jax.lax.while_loop(lambda state: state[0] > 1, turn, (11, x))[1]

    def until_small(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1.0, lambda x: jnp.sin(psum(x)), x)

    def branches(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: jnp.sin(psum(psum(x) + 1)), lambda x: jnp.cos(shift(x)), x)

    return {
        "nothing": (manual(mesh, rows)(jnp.sin), rows),
        "psum": (manual(mesh, rows)(psum), rows),
        "psum of all": (manual(mesh, P())(lambda x: jax.lax.psum(x, ("data", "tensor"))), P()),
        "all_gather": (
            manual(mesh, all_rows, rows)(lambda x: jax.lax.all_gather(x, "tensor", tiled=True)),
            all_rows,
        ),
        "psum_scatter": (
            manual(mesh, rows, all_rows)(lambda x: jax.lax.psum_scatter(x, "tensor", tiled=True)),
            rows,
        ),
        "all_to_all": (manual(mesh, all_rows)(lambda x: jax.lax.all_to_all(x, "tensor", 1, 0, tiled=True)), all_rows),
        "ppermute": (manual(mesh, all_rows)(shift), all_rows),
        "scan": (manual(mesh, rows)(repeat(7, lambda x: jnp.sin(psum(x)))), rows),
        "scan of two": (manual(mesh, rows)(repeat(6, scatter_and_gather)), rows),
        "ring in a scan": (manual(mesh, all_rows)(repeat(5, lambda x: jnp.sin(shift(x)))), all_rows),
        "scan in a scan": (manual(mesh, rows)(repeat(5, repeat(3, lambda x: jnp.sin(psum(x))))), rows),
        "kernel in a scan": (manual(mesh, rows)(repeat(7, lambda x: sine(psum(x)))), rows),
        "countdown": (manual(mesh, rows)(countdown), rows),
        "until small": (manual(mesh, rows)(until_small), rows),
        "branches": (manual(mesh, rows)(branches), rows),
    }


def report_all(topology: Topology) -> dict[str, dict[str, Any]]:
    """Reports on all programs."""
    mesh = mesh_of(topology)
    found = {}
    for name, (function, spec) in programs(mesh).items():
        array = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32, sharding=NamedSharding(mesh, spec))
        found[name] = aot.compile(jax.jit(function), array, topology=topology, mesh=mesh, name=name).to_json()
    return found


def fsdp_step(topology: Topology, layers: int, width: int, gather: bool = True) -> dict[str, Any]:
    """Gradients of a scanned stack of layers whose weights are split over all devices (ZeRO-3)."""
    mesh = MeshSpec.parse("fsdp").build(topology.devices())

    def loss(weights, x):
        def layer(x, w):
            whole = jax.sharding.reshard(w, P(None, None)) if gather else w
            return jnp.tanh(jnp.einsum("bd,df->bf", x, whole)), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2)

    weights = jax.ShapeDtypeStruct(
        (layers, width, width), jnp.float32, sharding=NamedSharding(mesh, P(None, "fsdp", None))
    )
    x = jax.ShapeDtypeStruct((64 * mesh.size, width), jnp.float32, sharding=NamedSharding(mesh, P("fsdp", None)))

    def step(weights, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    step = jax.jit(step, donate_argnums=0)
    return aot.compile(step, weights, x, topology=topology, mesh=mesh).to_json()


def too_large(topology: Topology, gib: int) -> dict[str, Any]:
    """A program with an argument of ``gib`` GiB on each device, and a result as large."""
    mesh = MeshSpec.parse("fsdp").build(topology.devices())
    shape = (topology.num_devices * gib * 2**8, 2**20)
    huge = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P("fsdp", None)))
    return aot.compile(jax.jit(lambda x: x + 1), huge, topology=topology, mesh=mesh, name="plus one").to_json()


def asynchronous(topology: Topology) -> dict[str, Any]:
    """An all-gather that the TPU compiler overlaps with the matmul before it, in a scan of 6 layers."""
    mesh = MeshSpec.parse("data=4,tensor=4").build(topology.devices())

    def layer(x, w):
        up = jax.sharding.reshard(w["up"], P(None, "tensor"))
        h = jnp.einsum("bd,df->bf", x, up, out_sharding=P("data", "tensor"))
        down = jax.sharding.reshard(w["down"], P("tensor", None))
        return jnp.einsum("bf,fd->bd", jax.nn.silu(h), down, out_sharding=P("data", None)), None

    def place(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    weights = {
        "up": place((6, 2048, 8192), None, "data", "tensor"),
        "down": place((6, 8192, 2048), None, "tensor", "data"),
    }
    x = place((8192, 2048), "data", None)
    options = {
        "xla_tpu_enable_async_collective_fusion": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
        "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
        "xla_tpu_overlap_compute_collective_tc": "true",
        "xla_enable_async_all_gather": "true",
    }
    step = jax.jit(lambda w, x: jax.lax.scan(layer, x, w)[0])
    with jax.set_mesh(mesh):
        compiled = step.lower(weights, x).compile(compiler_options=options)
    found = aot.report(compiled, topology).to_json()
    return {"report": found, "starts": (compiled.as_text() or "").count("AsyncCollectiveStart")}


def walked(topology: Topology, layers: int, width: int, rows: int) -> dict[str, Any]:
    """A scanned stack with recomputation, as the walker and the live ranges see it, and as the compiler says."""
    mesh = MeshSpec.parse("fsdp").build(topology.devices())

    def loss(weights, x):
        def layer(x, w):
            h = jax.nn.silu(x @ jax.sharding.reshard(w["up"], P(None, None)))
            return x + h @ jax.sharding.reshard(w["down"], P(None, None)), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, weights)[0].astype(jnp.float32) ** 2)

    def place(*shape):
        spec = P(None, "fsdp", None) if len(shape) == 3 else P("fsdp", None)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    weights = {"up": place(layers, width, 4 * width), "down": place(layers, 4 * width, width)}

    def step(weights, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    with jax.set_mesh(mesh):
        compiled = jax.jit(step, donate_argnums=0).lower(weights, place(rows * mesh.size, width)).compile()
    text, memory = compiled.as_text() or "", aot.report(compiled, topology)
    program = program_walker.read(text, Placement.of(mesh))
    found = live_ranges.read(text)
    return {
        "flops": program.flops,
        "cycles": program.cycles,
        "unknown": program.unknown,
        "temp": memory.temp_bytes,
        "live": found.temp_bytes,
        "kept": found.at_peak().get("saved for the backward pass", 0),
        "exchanges": sorted({(one.kind, one.where, times) for one, times in program.exchanges}),
        "collectives": program.collectives == collectives.read(text).collectives,
    }
