"""Token log-probabilities and entropies of the linear head: values, gradients of both, a split vocabulary, memory.

Legend: T tokens, D embed, V vocab.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels.cross_entropy import config, linear_token_logprobs
from pallas_kernels.cross_entropy.reference import token_logprobs_reference
from tests import environment

TOKENS, EMBED, VOCAB = 22, 5, 12


def draw(rng: np.random.Generator, dtype: Any = np.float64, scale: float = 1.0) -> list[np.ndarray]:
    """Hidden states, head, targets (one of them outside the vocabulary) and a slope for each result."""
    hidden, head = (scale * rng.normal(size=(n, EMBED)) for n in (TOKENS, VOCAB))
    targets = rng.integers(0, VOCAB, TOKENS, dtype=np.int32)
    targets[3] = -1
    return [hidden.astype(dtype), head.astype(dtype), targets, *rng.normal(size=(2, TOKENS)).astype(dtype)]


def results(fn: Any, hidden: Any, head: Any, targets: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """Both results, and the gradients of ``a . logprobs + b . entropies``."""

    def loss(hidden: Any, head: Any) -> tuple[Any, Any]:
        found = fn(hidden, head, jnp.asarray(targets))
        return jnp.sum(a * found[0] + b * found[1]), found

    (_, found), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
        jnp.asarray(hidden), jnp.asarray(head)
    )
    return jax.device_get(found), jax.device_get(grads)


def largest_error(got: Any, want: Any) -> float:
    return max(float(np.abs(g - w).max() / np.abs(w).max()) for g, w in zip(got, want, strict=True))


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(("chunk", "band"), [(None, 12), (1, 5), (5, 5), (100, 12)])
def test_is_the_formula(chunk, band, softcap, rng, float64, monkeypatch):
    monkeypatch.setattr(config, "band_vocab", lambda chunk, vocab: band)
    arguments = draw(rng)
    got = results(functools.partial(linear_token_logprobs, softcap=softcap, chunk=chunk), *arguments)
    want = results(functools.partial(token_logprobs_reference, softcap=softcap), *arguments)
    for have, should in zip(got, want, strict=True):
        assert largest_error(have, should) <= 1e-12


def test_reference_is_a_log_softmax(rng, float64):
    hidden, head, targets, *_ = draw(rng)
    logits = hidden @ head.T
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    logprobs, entropy = token_logprobs_reference(*map(jnp.asarray, (hidden, head, targets)))
    inside = np.flatnonzero(targets >= 0)
    np.testing.assert_allclose(np.asarray(logprobs)[inside], np.log(p[inside, targets[inside]]), rtol=1e-12)
    np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(-1), rtol=1e-12)


@pytest.mark.parametrize("which", [0, 1], ids=["log-probability", "entropy"])
def test_each_gradient_by_central_differences(which, rng, float64):
    """Of one result alone, so that neither gradient hides behind the other."""
    hidden, head, targets, *slopes = map(jnp.asarray, draw(rng))
    direction = rng.normal(size=hidden.shape)
    value = jax.jit(lambda hidden: jnp.vdot(slopes[which], linear_token_logprobs(hidden, head, targets, 2.0)[which]))
    h = 1e-5
    slope = float(value(hidden + h * direction) - value(hidden - h * direction)) / (2 * h)
    assert float(jnp.vdot(jax.grad(value)(hidden), direction)) == pytest.approx(slope, rel=1e-7)


def test_bfloat16_results_are_float32(rng):
    hidden, head, targets, a, b = draw(rng, jnp.bfloat16)
    got = results(linear_token_logprobs, hidden, head, targets, a, b)
    want = results(token_logprobs_reference, *(np.float32(x) for x in (hidden, head)), targets, a, b)
    assert [x.dtype for x in got[0]] == [np.float32] * 2
    assert [x.dtype for x in got[1]] == [jnp.bfloat16] * 2
    assert largest_error(got[0], want[0]) <= 1e-5  # sums are float32
    assert largest_error([np.float32(x) for x in got[1]], want[1]) <= 2**-6


def test_large_logits_do_not_overflow(rng):
    hidden, head, targets, a, b = draw(rng, np.float32, scale=1e3)
    assert all(
        np.isfinite(x).all() for x in jax.tree.leaves(results(linear_token_logprobs, hidden, head, targets, a, b))
    )


@pytest.mark.parametrize("split", [True, False], ids=["vocabulary split", "vocabulary whole"])
def test_on_a_mesh_is_as_on_one_device(split, rng, float64, monkeypatch):
    """Tokens over `data`, the vocabulary over `tensor` or whole."""
    monkeypatch.setattr(config, "band_vocab", lambda chunk, vocab: 2)
    hidden, head, targets, *slopes = draw(rng)
    want = results(token_logprobs_reference, hidden, head, targets, *slopes)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    rows, vocab = P("data"), P("tensor" if split else None)
    local = functools.partial(linear_token_logprobs, vocab_axis="tensor" if split else None, chunk=4)
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(local, in_specs=(rows, vocab, rows), out_specs=(rows, rows))
        placed = [jax.reshard(x, s) for x, s in ((hidden, rows), (head, vocab), (targets, rows))]
        got = results(mapped, *placed, *(jax.reshard(x, rows) for x in slopes))
    for have, should in zip(got, want, strict=True):
        assert largest_error(have, should) <= 1e-12


def temp_bytes(tokens: int, vocab: int) -> int:
    """Scratch memory of the compiled values and gradients of both results."""
    shapes = (tokens, EMBED), (vocab, EMBED)
    hidden, head = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    run = jax.jit(jax.grad(lambda *x: sum(y.sum() for y in linear_token_logprobs(*x)), argnums=(0, 1)))
    return run.lower(hidden, head, targets).compile(environment.AS_EVER).memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    """Sixteen times the logits (15 GiB more) add no more than what grows with the tokens or the vocabulary alone."""
    few, many = (8192, 32768), (32768, 131072)
    growth = temp_bytes(*many) - temp_bytes(*few)
    alone = 4 * (EMBED + 16) * (sum(many) - sum(few))  # per token: hidden, its gradient in float32 and a few numbers
    assert growth <= alone, f"{growth / 2**20:.1f} MiB more, of which {alone / 2**20:.1f} are of tokens and words"


def test_what_cannot_be_is_refused(rng):
    hidden, head, targets, *_ = map(jnp.asarray, draw(rng, np.float32))
    with pytest.raises(ValueError, match="chunk = 0"):
        linear_token_logprobs(hidden, head, targets, chunk=0)
    with pytest.raises(ValueError, match="softcap = -1"):
        linear_token_logprobs(hidden, head, targets, softcap=-1.0)
    with pytest.raises(ValueError, match="head must vary over vocab_axis 'tensor'"):
        linear_token_logprobs(hidden, head, targets, vocab_axis="tensor")
