"""MXFP4 training (Quartet): forward rounding bit for bit, unbiased gradients, and the loss of the reference model."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxllm.models import low_precision_matmul, mxfp4_matmul
from jaxllm.models.fp4_arithmetic import block_length
from jaxllm.train.precision import with_precision
from tests.models.test_mxfp4_matmul import ALARM, deviations, nearest, operands, reference, whole_numbers
from tests.proofs.harness import proof
from tests.proofs.policies.reference import RUN, evaluated, trained

BIASED = {
    "rounding to the nearest": {"round_to_e2m1_stochastically": nearest},
    "no margin, so that values are clipped": {"MARGIN": 1.0},
}
"""Changes of the backward pass whose gradients are biased."""


@proof("policies", count=500, sample=10)
def mxfp4_forward(seed: int) -> None:
    """Rounded values and trust mask are those of numpy and the 4-bit dtype of ml_dtypes, to the last bit."""
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.choice([1, 2, 3, 5, 8, 24, 32, 64, 96, 160], 2))
    axis = int(rng.integers(2))
    x, length = whole_numbers(rng, shape, axis), block_length(shape[axis])
    if length == 1:
        return  # one value has no spread
    values, trusted = mxfp4_matmul.project_to_mxfp4(jnp.asarray(x), axis, length)
    want, mask = reference(x, axis, length)
    np.testing.assert_array_equal(np.asarray(values).view(np.uint32), want.view(np.uint32))
    np.testing.assert_array_equal(trusted, mask)


@proof("policies", count=20, sample=1, bound={"standard errors": ALARM})
def mxfp4_unbiased(seed: int) -> dict[str, float]:
    """Mean gradients of 1,024 draws are those of the rounded operands; biased roundings are beyond the alarm.

    The alarm is 6.5 standard errors: of 2,049 means that are right, one is beyond it in 2e-7 of trials.
    """
    given = operands(np.random.default_rng(seed))
    found = max(deviations(*given, draws=1024, seed=seed))
    for name, change in BIASED.items():
        with mock.patch.multiple(mxfp4_matmul, **change):
            assert max(deviations(*given, draws=1024, seed=seed)) > 1.5 * ALARM, name
    return {"standard errors": found}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def naive_matmul(contract: int, there: Any, x: Array, w: Array, key: Any) -> Array:
    """FP4 matmul of operands that are rounded to the nearest with one scale each: no blocks, rotation or mask."""
    return _naive_forward(contract, there, x, w, key)[0]


def _rounded(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide))
    scale = jnp.where(largest > 0, largest, 1) / 6
    return (jnp.sign(wide) * mxfp4_matmul.round_to_e2m1(jnp.abs(wide) / scale) * scale).astype(x.dtype)


def _naive_forward(contract: int, there: Any, x: Array, w: Array, key: Any) -> tuple[Array, Any]:
    return _rounded(x) @ _rounded(w), (x, w)


def _naive_backward(contract: int, there: Any, kept: Any, dy: Array) -> tuple[Any, ...]:
    x, w = kept
    return _rounded(dy) @ _rounded(w).T, _rounded(x).T @ _rounded(dy), None


naive_matmul.defvjp(_naive_forward, _naive_backward)


def loss(name: str, seed: int) -> float:
    """Held-out loss of the reference model, trained in a precision; "naive" is ``naive_matmul``."""
    if name != "naive":
        run = with_precision(RUN, name)
        return evaluated(run, trained(run, seed)[0].params)
    run = dataclasses.replace(with_precision(RUN, "mxfp4"), name=name)  # its own entry in the cache of compiled steps
    with mock.patch.object(low_precision_matmul, "mxfp4_matmul", naive_matmul):
        return evaluated(run, trained(run, seed)[0].params)


@proof("policies", cases=(0, 1, 2), sample=1, bound={"gap": 0.05, "of the way": 0.5})
def mxfp4_loss(seed: int) -> dict[str, float]:
    """Loss in MXFP4, less that in bfloat16 ("gap"), and as a part of the way from there to the loss in naive FP4."""
    best, own, worst = (loss(name, seed) for name in ("bf16", "mxfp4", "naive"))
    assert best < 2.5, "the reference learns: bytes alone, by their frequencies, take 3.3"
    assert best < own < worst
    return {"gap": own / best - 1, "of the way": (own - best) / (worst - best)}
