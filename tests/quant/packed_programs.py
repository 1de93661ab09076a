"""Programs of a packed model, compiled for absent TPUs and GPUs: which matmuls they have, and what they hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sharding import MeshSpec
from sharding.isolate import run_isolated
from sharding.topology import Topology
from tests import tiny

LAYERS, EMBED, TOKENS = 2, 1024, 8


def compile_on(topology: Topology, mesh: str, name: str) -> dict[str, float]:
    """In a child process: compiles a forward pass of few tokens with packed weights.

    Returns calls of the kernel, and bytes of temporaries and of a layer's dense matrices on one device, gathered.
    """
    from jaxllm.compiler import aot
    from jaxllm.models import functional
    from jaxllm.models.attention_context import Segments
    from jaxllm.models.packed_weight import is_packed
    from jaxllm.quant.packing import pack_params
    from sharding import abstract_params

    config = tiny.decoder(
        embed_dim=EMBED,
        heads=16,
        kv_heads=16,
        head_dim=64,
        mlp=4 * EMBED,
        layers=LAYERS,
        dtype="bfloat16",
        vocab_size=512,
    )
    model = functional(config)
    spec = MeshSpec.parse(mesh)
    built = spec.build(topology.devices()[: topology.num_devices])
    with jax.set_mesh(built):
        abstract = abstract_params(model.abstract(), model.logical_axes(), built, model.rules)
        packed = jax.eval_shape(lambda params: pack_params(model, params, name), abstract)
    axes = model.logical_axes()

    def place(array: Any, names: Any) -> Any:
        return jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=jax.NamedSharding(built, model.rules.spec(names, built))
        )

    def placed(weight: Any, names: Any) -> Any:
        if not is_packed(weight):
            return place(weight, names)
        values, scales = weight.array_axes(names)
        return dataclasses.replace(weight, values=place(weight.values, values), scales=place(weight.scales, scales))

    params = jax.tree.map(placed, packed, axes, is_leaf=is_packed)
    tokens = jax.ShapeDtypeStruct(
        (TOKENS, 1), jnp.int32, sharding=jax.NamedSharding(built, model.rules.spec(("batch", "seq"), built))
    )

    def forward(params: Any, tokens: Any) -> Any:
        hidden, _ = model.forward(params, tokens, jnp.zeros_like(tokens), Segments())
        return model.head(params, hidden)

    with jax.set_mesh(built):
        text = jax.jit(forward).lower(params, tokens).as_text()
    report = aot.compile(jax.jit(forward), params, tokens, topology=topology, mesh=built)
    dense = 2 * (4 * EMBED * 1024 + 3 * EMBED * 4 * EMBED) / built.shape.get("tensor", 1)
    return {
        "kernels": float(text.count("packed_matmul")),
        "temp_bytes": float(report.temp_bytes),
        "dense_bytes": dense,
    }


def compile_head_on(topology: Topology, rows: int, bits: int) -> dict[str, float]:
    """In a child process: compiles the logits of eight hidden states with a packed output matrix of so many rows.

    Returns bytes of temporaries, and of the dense matrix.
    """
    from jaxllm.compiler import aot
    from jaxllm.models.packed_weight import PackedWeight
    from jaxllm.quant.formats.code_groups import CodeGroups
    from jaxllm.quant.grids import IntGrid

    form = CodeGroups(IntGrid(bits), 32 if bits < 8 else None, -1)
    mesh = MeshSpec.parse("data=1").build(topology.devices()[:1])
    packed = jax.eval_shape(form.pack, jax.ShapeDtypeStruct((rows, EMBED), jnp.float32))
    x = jax.ShapeDtypeStruct((TOKENS, 1, EMBED), jnp.bfloat16)
    given = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.NamedSharding(mesh, jax.P())) for a in (x, *packed)]

    def head(x: Any, values: Any, scales: Any) -> Any:
        return PackedWeight(values, scales, form).logits(x, ("batch", "seq", "act_vocab"))

    report = aot.compile(jax.jit(head), *given, topology=topology, mesh=mesh)
    return {"temp_bytes": float(report.temp_bytes), "dense_bytes": 2.0 * rows * EMBED}


def compile_cell(topology: str, mesh: str, name: str) -> dict[str, float]:
    """Compiles a cell in a child process; raises what the compiler says."""
    return run_isolated("tests.quant.packed_programs:compile_on", topology, {"mesh": mesh, "name": name})
