"""Loops over parts of one stack: the gradients of one loop, in the memory of one loop."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import functional
from jaxllm.models.layers import stack_reads
from jaxllm.plan.graphs.peak_estimate import estimate
from jaxllm.train import value_and_grad
from tests import tiny
from tests.models.jaxprs import equations

pytestmark = pytest.mark.usefixtures("float64")
LAYERS = 8
CONFIG = tiny.decoder(embed_dim=32, mlp=256, vocab_size=16, layers=LAYERS)


@functools.cache
def compiled(remat: str) -> tuple[Any, Any, Any]:
    """Compiled loss and gradients with a remat policy, parameters, and a batch."""
    model = functional(dataclasses.replace(CONFIG, remat=remat))
    params = model.init(jax.random.key(0))
    batch = jax.tree.map(jnp.asarray, tiny.batch(0, 2, 4, CONFIG.vocab_size, packed=False))
    return jax.jit(value_and_grad(model)).lower(params, batch).compile(), params, batch


def run(remat: str) -> Any:
    program, params, batch = compiled(remat)
    return program(params, batch)


@pytest.mark.parametrize("remat", ["full=3,attention=5", "none=1,full=6,elementwise=1", "sqrt=4,full=4"])
def test_gradients_are_those_of_one_loop(remat):
    ones, found = run("full"), run(remat)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-13), found, ones)


def test_no_loop_copies_the_stack():
    """Temporary bytes of two loops are those of one, but for less than a quarter of the stack: slices, and gradients
    that are padded and summed, were one stack more each."""
    _, params, _ = compiled("full")
    stack = sum(x.nbytes for x in jax.tree.leaves(params["segments"]))
    one, two = (compiled(r)[0].memory_analysis().temp_size_in_bytes for r in ("full", "full=3,attention=5"))
    assert two - one < stack / 4


@pytest.mark.parametrize("remat", ["full", "full=3,attention=5", "none=1,full=6,elementwise=1", "sqrt=4,full=4"])
def test_the_estimate_knows_that_gradients_are_written_in_place(remat):
    """Without a compiler: within 15% of the compiled bytes, of which the stack is a third."""
    program, params, batch = compiled(remat)
    step = value_and_grad(functional(dataclasses.replace(CONFIG, remat=remat)))
    found, sizes = estimate(jax.make_jaxpr(step)(params, batch)), program.memory_analysis()
    assert found.arguments == sizes.argument_size_in_bytes
    assert found.temporaries == pytest.approx(sizes.temp_size_in_bytes + sizes.output_size_in_bytes, rel=0.15)


def test_integers_have_no_gradient():
    stack: dict[str, Any] = {"packed": jnp.arange(6, dtype=jnp.int8).reshape(3, 2), "scales": jnp.arange(3.0)}

    def total(stack: Any) -> Any:
        gradient, found = stack_reads.gradient_of(stack), 0.0
        for layer in range(3):
            own, gradient = stack_reads.read(jax.lax.stop_gradient(stack), gradient, jnp.int32(layer))
            found += (layer + 1) * own["scales"] * own["packed"].sum()
        return found

    value, grads = jax.value_and_grad(total, allow_int=True)(stack)
    assert value == 2 * 5 + 3 * 2 * 9
    assert grads["packed"].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(grads["scales"], [1, 2 * 5, 3 * 9])


def test_what_is_not_trained_has_no_gradient():
    frozen = jnp.ones((3, 2))

    def total(trained: Any) -> Any:
        stack = {"frozen": frozen, "trained": trained}
        gradient, found = stack_reads.gradient_of(stack), 0.0
        for layer in range(3):
            own, gradient = stack_reads.read(jax.lax.stop_gradient(stack), gradient, jnp.int32(layer))
            found += (own["trained"] * own["frozen"]).sum()
        return found

    traced = jax.make_jaxpr(jax.grad(total))(jnp.ones((3, 2)))
    assert sum(e.primitive.name == "dynamic_update_slice" for e in equations(traced)) == 3
