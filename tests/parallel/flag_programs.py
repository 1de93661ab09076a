"""Compiler flags in a child process: a scanned layer under FSDP, with and without the options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.parallel.compiler_flags import FLAGS, options
from sharding import MeshSpec
from sharding.topology import Topology


def accepted(topology: Topology) -> list[str]:
    """Options of the platform that the compiler knows; one that it does not know has to fail."""
    mesh = MeshSpec.parse("fsdp").build(topology.devices())
    x = jax.ShapeDtypeStruct((8 * mesh.size, 128), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    known = []
    with jax.set_mesh(mesh):
        lowered = jax.jit(lambda x: x + 1).lower(x)
        for flag in FLAGS:
            if flag.is_taken(topology.platform, topology.device_kind):
                lowered.compile(compiler_options={flag.name: flag.value})
                known.append(flag.name)
        try:
            lowered.compile(compiler_options={"xla_no_such_option": "true"})
        except jax.errors.JaxRuntimeError:
            return known
    raise AssertionError("an unknown option was accepted")


def fsdp(topology: Topology) -> dict[str, Any]:
    """Static counts of asynchronous collectives in the text, with and without the options of the table."""
    chosen = None, options(topology.platform, topology.device_kind)
    texts = layer_programs(topology, chosen, layers=3, width=1024, hidden=4096, rows=2048)
    marks = {"tpu": "AsyncCollectiveStart", "gpu": "all-gather-start("}
    return dict(zip(("without", "with"), (text.count(marks[topology.platform]) for text in texts), strict=True))


def gathers(topology: Topology) -> dict[str, Any]:
    """All-gathers of small layers compiled with the options of the table; a compiler may refuse options only there."""
    chosen = options(topology.platform, topology.device_kind)
    (text,) = layer_programs(topology, (chosen,), layers=2, width=256, hidden=512, rows=128)
    return {"all-gathers": text.count("all-gather("), "options": chosen}


def layer_programs(
    topology: Topology, chosen: Sequence[dict[str, str] | None], *, layers: int, width: int, hidden: int, rows: int
) -> list[str]:
    """Texts of a training step of scanned layers under FSDP, compiled with each of the options."""
    mesh = MeshSpec.parse("fsdp").build(topology.devices())

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        up, down = (jax.sharding.reshard(part.astype(jnp.bfloat16), P(None, None)) for part in w)
        return x + jnp.dot(jax.nn.silu(jnp.dot(x, up)), down), None

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0].astype(jnp.float32) ** 2).sum()

        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, jax.grad(loss)(weights))

    def array(shape: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    weights = (
        array((layers, width, hidden), jnp.float32, P(None, "fsdp")),
        array((layers, hidden, width), jnp.float32, P(None, None, "fsdp")),
    )
    x = array((rows * mesh.size, width), jnp.bfloat16, P("fsdp"))
    with jax.set_mesh(mesh):
        lowered = jax.jit(step, donate_argnums=0).lower(weights, x)
        return [lowered.compile(compiler_options=one).as_text() for one in chosen]
