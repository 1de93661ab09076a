"""Sophia's Gauss-Newton-Bartlett estimate of the Hessian's diagonal (arXiv:2305.14342, algorithm 2).

Labels are sampled from the model's own predictions. For N of them and the gradient g of their mean loss, the diagonal
of the Gauss-Newton matrix is the expectation of ``N g^2``.

Legend: B batch, S sequence, D embed, V vocab, T tokens on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.models import Functional
from jaxllm.models.functional import cap_logits
from jaxllm.models.param_subset import select
from jaxllm.optim import StepHooks
from jaxllm.optim.sophia import HessianEstimate
from jaxllm.train.config import RunConfig
from jaxllm.train.objectives.objective_base import HIDDEN, TOKENS, LossSums
from jaxllm.train.run_model import trained_params
from jaxllm.train.step.loss import permute_sequence, split_micro_batches, unpermute_sequence, value_and_grad
from jaxllm.train.step.train_state import TrainState
from pallas_kernels.ring_attention import Layout

CHUNK = 256
"""Tokens whose logits a device holds at a time."""


def sophia_hooks(run: RunConfig, model: Functional) -> StepHooks:
    """Step hooks of Sophia: each update gets a ``hessian`` estimate."""
    shared: dict[str, Any] = {"accumulate": run.accumulate, "layout": run.parallel.layout}
    trainable = trained_params(run, model)
    plain = value_and_grad(model, zero=run.parallel.zero, trainable=trainable, **shared)
    estimate = gauss_newton_estimator(model, plain, run.optim.every, trainable=trainable, **shared)
    return StepHooks(update_inputs=lambda state, batch: {"hessian": estimate(state, batch)})


def gauss_newton_estimator(
    model: Functional,
    value_and_grad: Callable[[Any, Any], tuple[LossSums, Any]],
    every: int,
    *,
    accumulate: int = 1,
    layout: Layout = "contiguous",
    trainable: Any = None,
) -> Callable[[TrainState, Any], HessianEstimate]:
    """Function ``(state, batch) -> HessianEstimate`` with a new estimate every ``every`` steps, from the first step on.

    Args:
        model: the architecture.
        value_and_grad: of the step, without z-loss and routing losses.
        every: steps between two estimates; zeros in between.
        accumulate: micro-batches, as in the step.
        layout: which tokens of a row each device gets.
        trainable: subset of the parameters that is updated; None: all.
    """

    def estimate(state: TrainState, batch: Any) -> Any:
        key = jax.random.fold_in(jax.random.fold_in(state.rng, 1), state.step)
        drawn = sample_targets(model, state.params, batch, key, accumulate=accumulate, layout=layout)
        sums, grads = value_and_grad(state.params, batch._replace(targets=drawn))
        return jax.tree.map(lambda g: sums.count.astype(g.dtype) * jnp.square(g), grads)

    def run(state: TrainState, batch: Any) -> HessianEstimate:
        fresh = state.step % every == 0
        nothing = lambda state, batch: jax.tree.map(jnp.zeros_like, select(trainable, state.params))  # noqa: E731
        return HessianEstimate(fresh, jax.lax.cond(fresh, estimate, nothing, state, batch))

    return run


def sample_targets(
    model: Functional, params: Any, batch: Any, key: Array, *, accumulate: int = 1, layout: Layout = "contiguous"
) -> Int[Array, "B S"]:
    """Targets sampled from the model's predictions, at unmasked places of the batch; independent of the mesh.

    Args:
        key: RNG key of the step.
    """
    with sharding.use_rules(model.rules):
        uniform = jax.random.uniform(key, batch.targets.shape, jnp.promote_types(model.config.dtype, jnp.float32))
        whole = batch._replace(targets=sharding.constrain(uniform, *TOKENS))
        parts = jax.tree.map(lambda x: split_micro_batches(x, accumulate), whole)

    def one(part: Any) -> Int[Array, "B2 S"]:
        with sharding.use_rules(model.rules):
            part = permute_sequence(part, layout)
        x = model.forward(params, part.tokens, part.positions, model.training_context(part.segment_ids, layout))[0]
        hidden, head = model.unembed(params, x)
        with sharding.use_rules(model.rules):
            return unpermute_sequence(_sampled(hidden, head, part.targets, model.config.logit_softcap), layout)

    drawn = jax.lax.map(one, parts).swapaxes(0, 1)
    with sharding.use_rules(model.rules):
        drawn = sharding.constrain(drawn.reshape(batch.targets.shape), *TOKENS)
    return jnp.where(batch.targets >= 0, drawn, batch.targets)


def _sampled(
    hidden: Float[Array, "B S D"], head: Float[Array, "V D"], uniform: Float[Array, "B S"], softcap: float | None
) -> Int[Array, "B S"]:
    """Inverse-CDF sampling: the token is the number of cumulative probabilities below the uniform value."""
    vocab = sharding.axis_names("act_vocab")

    def local(hidden: Array, head: Array, uniform: Array) -> Array:
        def one(part: tuple[Array, Array]) -> Array:
            hidden, uniform = part
            logits = cap_logits((head @ hidden).astype(uniform.dtype), softcap)
            highest = jnp.max(logits)
            weights = jnp.exp(logits - (jax.lax.pmax(highest, vocab) if vocab else highest))
            sums, total = jnp.cumsum(weights), jnp.sum(weights)
            if vocab:
                shards = jax.lax.all_gather(total, vocab)
                before = jnp.arange(len(shards)) < jax.lax.axis_index(vocab)
                sums, total = sums + jnp.sum(jnp.where(before, shards, 0)), jnp.sum(shards)
            count = jnp.sum(sums < uniform * total, dtype=jnp.int32)
            return jax.lax.psum(count, vocab) if vocab else count

        tokens = hidden.reshape(-1, hidden.shape[-1]), uniform.reshape(-1)
        return jax.lax.map(one, tokens, batch_size=CHUNK).reshape(uniform.shape)

    found = sharding.shard_map(local, (HIDDEN, ("act_vocab", None), TOKENS), TOKENS)(hidden, head, uniform)
    return jnp.minimum(found, head.shape[0] - 1)
