"""Value head: a declared parameter beside the output matrix, whose product with a hidden state is the state's value.

It is no part of the architecture: the forward pass, the engine, exports and runs that start from the model know nothing
of it. A run whose objective has values declares it, so that it is initialised, sharded, trained and saved as the other
parameters are.

Legend: B batch, S sequence, D embed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import sharding
from jaxllm.models.functional import DeclaredParam, Functional, Params
from jaxllm.models.params import at_least_f32, constant

VALUE_HEAD = "head/value"
"""Path of the value head [D] in the parameters."""
AXES = ("embed",)


def with_value_head(model: Functional) -> Functional:
    """The model with a value head of zeros: at the start every state has the value 0."""
    before, dtype = model.adapt, jnp.dtype(model.config.param_dtype)
    # A vector is to optimizers what a gain is: neither decayed nor orthogonalised.
    declared = DeclaredParam(constant(0.0, (model.config.embed_dim,), AXES, dtype, role="gain"), ())

    def adapt(params: Params) -> Params:
        return put_value_head(params if before is None else before(params), declared)

    return replace(model, adapt=adapt)


def put_value_head(params: Params, head: Any) -> Params:
    """Tree of parameters, or of something of each, with a value head."""
    return {**params, "head": {**params["head"], "value": head}}


def without_value_head(params: Params) -> Params:
    """Tree of parameters without the value head; the tree itself where it has none."""
    return {**params, "head": {name: own for name, own in params["head"].items() if name != "value"}}


def fresh_value_head(abstract: jax.ShapeDtypeStruct) -> Array:
    """Value head of zeros with this shape, dtype and sharding."""
    return jax.jit(lambda: jnp.zeros(abstract.shape, abstract.dtype), out_shardings=abstract.sharding)()


def state_values(params: Params, hidden: Float[Array, "B S D"]) -> Float[Array, "B S"]:
    """Values of states, in at least float32; sharding rules are in force.

    Args:
        params: with a value head.
        hidden: final hidden states after the norm, as ``Functional.unembed`` returns them.
    """
    head = sharding.gather_weight(params["head"]["value"], *AXES)
    dtype = at_least_f32(hidden.dtype)
    return jnp.sum(hidden.astype(dtype) * head.astype(dtype), axis=-1)
