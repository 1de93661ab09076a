"""Steps in chunks of tokens beside whole ones: gradients, and the bytes that the backward pass needs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.data import Batch
from jaxllm.models import DecoderConfig, Functional, functional
from jaxllm.models.param_subset import select, trainable_mask
from jaxllm.peft.adapted_model import adapted_model
from jaxllm.peft.adapter_method import AdapterConfig
from jaxllm.posttrain.coserve.chunked_gradients import ChunkedGradients, Place
from jaxllm.posttrain.coserve.saved_residuals import residual_plan
from jaxllm.posttrain.coserve.work_units import padded_length, work_units
from jaxllm.train.objectives.objective_base import CrossEntropyObjective
from jaxllm.train.step.loss import loss_sums, value_and_grad
from tests import tiny

OBJECTIVE = CrossEntropyObjective(z_loss=1e-3)


def adapted(config: DecoderConfig, seed: int = 0, **adapter: Any) -> tuple[Functional, Any, Any]:
    """A model with an adapter whose factors are all random, its parameters, and the mask of the trained ones."""
    options = {"kind": "lora", "rank": 3, **adapter}
    model = adapted_model(functional(config), AdapterConfig(**options))
    params = jax.jit(lambda key: model.init(key))(jax.random.key(seed))
    mask = trainable_mask(model, ("adapter",))
    rng = np.random.default_rng(seed)
    spoilt = jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.1, x.shape), x.dtype), params)
    return model, spoilt, mask


def padded(batch: Batch, length: int) -> Batch:
    """A batch whose rows end in padding up to ``length``."""
    more = length - batch.tokens.shape[1]
    rows = {
        name: x if x is None else np.pad(x, ((0, 0), (0, more)), constant_values=-1 if name == "targets" else 0)
        for name, x in batch._asdict().items()
    }
    return Batch(**rows)


def chunked_step(model: Functional, params: Any, mask: Any, batch: Batch, chunk: int, rows: int = 1) -> tuple[Any, Any]:
    """Loss sums and gradients of a step in chunks, in the order of its units."""
    batch = padded(batch, padded_length(batch.tokens.shape[1], chunk))
    step = ChunkedGradients(model, OBJECTIVE, mask, rows=rows, seq_len=batch.tokens.shape[1], chunk=chunk)
    trained, frozen = select(mask, params), select(jax.tree.map(lambda own: not own, mask), params)
    forward, backward = jax.jit(step.forward), jax.jit(step.backward)
    # Whatever the arrays held before must not matter.
    spoil = lambda tree: jax.tree.map(lambda x: x + 7, tree)  # noqa: E731
    cache, of_cache = step.empty_cache(), spoil(step.empty_cache_gradients())
    sums, grads = spoil(step.empty_sums(batch)), jax.tree.map(lambda x: jnp.full_like(x, 9), trained)
    saved = []
    for unit in work_units(batch.segment_ids, rows, chunk):
        place = Place(np.int32(unit.row), np.int32(unit.token), np.bool_(unit.fresh), np.bool_(unit.last))
        if unit.kind == "forward":
            cache, sums, own = forward(trained, frozen, batch, place, cache, sums)
            saved.append(own)
        elif unit.kind == "backward":
            of_cache, grads = backward(trained, frozen, batch, place, cache, saved.pop(), of_cache, grads)
    assert not saved
    return sums, grads


def step_error(model: Functional, params: Any, mask: Any, batch: Batch, chunk: int, rows: int = 1) -> float:
    """Largest error of loss sums and gradients of a step in chunks against the step of whole rows.

    It is relative to the norm of the array, but at least to a thousandth of the largest one's: where all tokens of a
    row are alike, the gradients of queries and keys are zero but for rounding.
    """
    want_sums, want = jax.jit(value_and_grad(model, objective=OBJECTIVE, trainable=mask))(params, batch)
    sums, grads = chunked_step(model, params, mask, batch, chunk, rows)
    norms = [float(jnp.linalg.norm(x)) for x in jax.tree.leaves(want)]
    assert max(norms) > 1e-6
    apart = [float(jnp.linalg.norm(x - y)) for x, y in zip(*map(jax.tree.leaves, (grads, want)), strict=True)]
    errors = [error / max(norm, 1e-3 * max(norms)) for error, norm in zip(apart, norms, strict=True)]
    return max(*errors, tiny.leaf_error(list(sums[:4]), list(want_sums[:4])))


def whole_bytes(model: Functional, params: Any, batch: Batch, mask: Any = None) -> int:
    """Bytes of floats that the backward pass of whole rows takes from its forward pass.

    Args:
        mask: parameters that gradients are taken of; None: all, so that nothing is pruned.
    """
    frozen = params if mask is None else select(jax.tree.map(lambda own: not own, mask), params)

    def pullback_of(params: Any, batch: Batch) -> Any:
        def loss(own: Any) -> Any:
            whole = own if mask is None else jax.tree.map(
                lambda mine, its: its if mine is None else mine, own, frozen, is_leaf=lambda x: x is None
            )  # fmt: skip
            return loss_sums(model, whole, batch, objective=OBJECTIVE).loss

        return jax.vjp(loss, params if mask is None else select(mask, params))[1]

    plan = residual_plan(pullback_of, params, batch)
    return sum(x.size * x.dtype.itemsize for x in plan.shapes if jnp.issubdtype(x.dtype, jnp.floating))
