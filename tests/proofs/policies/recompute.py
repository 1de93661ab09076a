"""Gradient accumulation and remat change neither loss nor gradients."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.models import functional
from jaxllm.models.remat import VALUES
from jaxllm.train import value_and_grad
from tests import quick, tiny
from tests.proofs.harness import proof

POLICIES = (
    *("elementwise", "attention", "full", "sqrt", "offload", "offload:0.5"),
    *("none=1,full=3", "full=2,attention=1,elementwise=1", "offload=1,offload:0.25=2,none=1"),
)
CONFIG = tiny.decoder(layers=4, qk_norm="head", norms="sandwich", remat="none")


@functools.cache
def result(remat: str, accumulate: int, seed: int) -> tuple[float, Any]:
    """Loss and gradients of a packed batch."""
    config = dataclasses.replace(CONFIG, remat=remat)
    params = jax.tree.map(jnp.asarray, quick.params(config, seed))
    batch = jax.tree.map(jnp.asarray, tiny.batch(seed, 4, 12, config.vocab_size, packed=True, padding=True))
    sums, grads = quick.jit(value_and_grad(functional(config), accumulate=accumulate))(params, batch)
    return float(sums.loss / sums.count), grads


@proof(
    "policies",
    cases=[f"save:{'+'.join(kept)}" for n in (1, 2, 3, 4) for kept in itertools.combinations(VALUES, n)],
    sample=1,
    bound={"loss": 1e-10, "grads": 1e-10},
    float64=True,
)
def kept_values(remat: str) -> dict[str, float]:
    """Every set of kept values, in two micro-batches, against no remat in one."""
    (loss, grads), (want, wanted) = result(remat, 2, 1), result("none", 1, 1)
    return {"loss": abs(loss / want - 1), "grads": tiny.leaf_error(grads, wanted)}


@proof(
    "policies",
    cases=[(remat, accumulate) for remat in POLICIES for accumulate in (1, 2, 4)],
    sample=2,
    bound={"loss": 1e-10, "grads": 1e-10},
    float64=True,
)
def recompute(case: tuple[str, int]) -> dict[str, float]:
    """Every policy, with one, two and four micro-batches, against no remat with one."""
    (loss, grads), (want, wanted) = result(*case, 0), result("none", 1, 0)
    return {"loss": abs(loss / want - 1), "grads": tiny.leaf_error(grads, wanted)}
