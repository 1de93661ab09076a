"""Shared test body of every implementation of linear cross-entropy: cases, the formula in float64, one check.

Legend: T tokens, D embed, V vocab.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import interpreting
from pallas_kernels.cross_entropy import config, linear_cross_entropy

PACKAGE = "pallas_kernels.cross_entropy"
PALLAS = ("pallas_tpu", "pallas_gpu")
PLAIN = ("xla", "xla_bands", "reference")
"""Implementations that run on any device, in any precision."""


class Case(NamedTuple):
    t: int
    d: int
    v: int
    z_loss: float = 0.0
    softcap: float | None = None


CASES = {
    "one of everything": Case(1, 1, 1),
    "one token": Case(1, 3, 7, 0.1),
    "odd": Case(13, 5, 11),
    "even": Case(10, 4, 8, 0.1),
    "many blocks": Case(21, 9, 45),
    "whole blocks": Case(16, 8, 64, 0.1),
    "everything": Case(13, 5, 37, 0.1, 1.5),
}
"""Blocks are of 4 to 16 tokens and ids in ``small_pieces``."""

KILLERS = ("everything", "many blocks")
"""Cases that a mutant is tried on, until one fails; see tests/proofs/kernels/mutants.py."""

_SHARED = {
    "another target": ("blockwise", "local, NO_TARGET), varying", "local + 1, NO_TARGET), varying"),
    "z-loss slope missing": ("blockwise", "(1.0 + 2.0 * options.z_loss * lse)", "1.0"),
    "z-loss missing": ("blockwise", "nll + options.z_loss * z, nll", "nll, nll"),
    "cap's slope missing": ("blockwise", "1.0 - part * part", "1.0"),
    "cap missing": ("blockwise", "return softcap * part,", "return products,"),
    "weights not differentiated": ("blockwise", "(lse - target + options", "(lse + options"),
}
MUTATIONS: dict[tuple[str, str], tuple[str, str, str]] = {
    ("reference", "z-loss is linear"): ("reference", "lse**2", "lse"),
    ("reference", "another target"): ("reference", "jnp.arange(vocab) ==", "jnp.arange(vocab) + 1 =="),
    ("xla", "another target"): ("xla", "hit = jnp.arange(vocab) ==", "hit = jnp.arange(vocab) + 1 =="),
    ("xla", "z-loss slope missing"): ("xla", "(1.0 + 2.0 * options.z_loss * lse)", "1.0"),
    ("xla", "cap's slope missing"): ("xla", "slopes * (1.0 - jnp.square(logits / options.softcap))", "slopes"),
    ("xla", "target outside"): ("xla", "target = jnp.where(held, target, 0.0)", "target = target"),
    ("xla_bands", "missing rescale"): ("bands", "total * jnp.exp(top - highest) + jnp", "total + jnp"),
    ("xla_bands", "another target"): ("bands", "(local - first)[:, None]", "(local - first + 1)[:, None]"),
    ("xla_bands", "band's place"): ("bands", "astype(head.dtype), first)", "astype(head.dtype), 0)"),
    ("xla_bands", "chunk's place"): ("bands", "count) + more, start)", "count) + more, 0)"),
    ("xla_bands", "chunks not added up"): ("bands", "d_rows += jnp", "d_rows = jnp"),
    ("xla_bands", "bands not added up"): (
        "bands",
        "update_rows(d_hidden, slice_rows(d_hidden, start, count) + more",
        "update_rows(d_hidden, more",
    ),
    ("xla_bands", "last piece missing"): ("bands", "if rest else state", "if False else state"),
    ("xla_bands", "cap's slope missing"): ("bands", "of_target, 0.0)) * slope", "of_target, 0.0))"),
    **{(name, what): edit for name in (*PALLAS, "xla_bands") for what, edit in _SHARED.items()},
    ("pallas_tpu", "missing rescale"): ("pallas_tpu", "jnp.exp(top[...] - highest)", "jnp.ones_like(highest)"),
    ("pallas_tpu", "average not rescaled"): ("pallas_tpu", "ref[...] * keep + dot", "ref[...] + dot"),
    ("pallas_tpu", "beyond the vocabulary"): (
        "pallas_tpu",
        "jnp.where(column < vocab, logits",
        "jnp.where(True, logits",
    ),
    ("pallas_tpu", "edge of the head"): ("pallas_tpu", "_iota((step, 1), 0) < vocab", "_iota((step, 1), 0) <= vocab"),
    ("pallas_tpu", "not begun at zero"): ("pallas_tpu", "acc[...] = jnp.zeros_like(acc)", "pass"),
    ("pallas_tpu", "not added up"): ("pallas_tpu", "acc[...] += dot(", "acc[...] = dot("),
    ("pallas_gpu", "missing rescale"): ("pallas_gpu", "total * jnp.exp(top - highest) + jnp", "total + jnp"),
    ("pallas_gpu", "parts not rescaled"): (
        "pallas_gpu",
        "jnp.sum(total * jnp.exp(top - highest), axis",
        "jnp.sum(total, axis",
    ),
    ("pallas_gpu", "beyond the vocabulary"): (
        "pallas_gpu",
        "jnp.where(column < vocab, apply_softcap",
        "jnp.where(True, apply_softcap",
    ),
    ("pallas_gpu", "last band missing"): ("pallas_gpu", "if vocab % band:", "if False:"),
    ("pallas_gpu", "band's place"): ("pallas_gpu", "i, first[0] + start)", "i, start)"),
    ("pallas_gpu", "not added up"): ("pallas_gpu", "return acc + dot(a, b, (1, 1))", "return dot(a, b, (1, 1))"),
}
"""(implementation, mistake) -> (module of the package, text, text with the mistake)."""


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """Blocks so small that few tokens and ids cross many of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "tpu_blocks", lambda *_: config.CrossEntropyTpuBlocks(8, 16, 16, 8))
        patch.setattr(config, "chunk_tokens", lambda tokens: min(tokens, 8))
        patch.setattr(config, "band_vocab", lambda chunk, vocab: min(vocab, 8))
        patch.setattr(config, "gpu_blocks", lambda *_: config.CrossEntropyGpuBlocks(4, 8, 4, 8, 2, 96, 16, 2, 1, 1))
        yield


def draw(rng, tokens, embed, vocab, dtype=np.float64):
    """hidden, head, targets, weights; logits are of about one, some targets are nowhere, with weight zero."""
    hidden, head = rng.normal(size=(tokens, embed)) / np.sqrt(embed), rng.normal(size=(vocab, embed))
    targets = rng.integers(0, vocab, tokens).astype(np.int32)
    weights = rng.uniform(0.5, 2, tokens)
    for i, nowhere in enumerate((-1, vocab, np.iinfo(np.int32).max, np.iinfo(np.int32).min)):
        targets[2 + 2 * i : 3 + 2 * i] = nowhere
    weights[(targets < 0) | (targets >= vocab)] = 0
    return jnp.asarray(hidden, dtype), jnp.asarray(head, dtype), jnp.asarray(targets), jnp.asarray(weights, dtype)


def oracle(hidden, head, targets, weights, z_loss, softcap=None):
    """((loss, nll, z), gradients of hidden, head, weights), in float64."""
    hidden, head, weights = (np.asarray(x, np.float64) for x in (hidden, head, weights))
    targets = np.asarray(targets)
    logits, slope = hidden @ head.T, 1.0
    if softcap is not None:
        logits, slope = softcap * np.tanh(logits / softcap), np.cosh(logits / softcap) ** -2
    top = logits.max(-1, keepdims=True)
    lse = (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))[:, 0]
    hit = targets[:, None] == np.arange(head.shape[0])
    nll = lse - (hit * logits).sum(-1)
    losses = nll + z_loss * lse**2
    softmax = np.exp(logits - lse[:, None])
    d_logits = weights[:, None] * (softmax * (1 + 2 * z_loss * lse)[:, None] - hit) * slope
    sums = weights @ losses, weights @ nll, weights @ lse**2
    return sums, (d_logits @ head, d_logits.T @ hidden, losses)


def loss_and_grads(arguments, **options):
    hidden, head, targets, weights = arguments

    @jax.jit
    def run(hidden, head, weights):
        def loss(hidden, head, weights):
            return linear_cross_entropy(hidden, head, targets, weights, **options)

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(hidden, head, weights)

    (loss, stats), grads = run(hidden, head, weights)
    return (loss, *stats), grads


def errors(got, want, floors=None):
    """The largest ||got - want|| / ||want||; a norm below its floor counts as that."""
    floors = [np.finfo(np.float64).tiny] * len(want) if floors is None else floors
    each = [
        np.linalg.norm(np.asarray(a, np.float64) - b) / max(np.linalg.norm(b), floor)
        for a, b, floor in zip(got, want, floors, strict=True)
    ]
    return float(np.max(each))  # nan, if there is one


def floors(hidden, head, targets, weights):
    """(of sums, of gradients): what is subtracted from each other. A token sure of its target has next to no loss."""
    tokens, embed = hidden.shape
    total, norm = float(jnp.sum(weights)), float(jnp.linalg.norm(weights))
    return [total] * 3, [norm * np.sqrt(embed), norm, np.sqrt(tokens)]


def check(
    implementation: str,
    case: Case,
    rng: np.random.Generator,
    dtype=np.float32,
    bound: float = 1e-6,
    chunk: int | None = None,
) -> dict[str, float]:
    """Sums and gradients, twice, against float64, and the sums of a program without gradients."""
    low = np.float32 if dtype == jnp.bfloat16 else dtype
    hidden, head, targets, weights = draw(rng, case.t, case.d, case.v, low)
    arguments = hidden.astype(dtype), head.astype(dtype), targets, weights
    options = {"z_loss": case.z_loss, "softcap": case.softcap, "implementation": implementation, "chunk": chunk}
    with interpreting() if implementation.startswith("pallas") else contextlib.nullcontext():
        got, again = (loss_and_grads(arguments, **options) for _ in range(2))
        loss, stats = jax.jit(lambda *x: linear_cross_entropy(*x, **options))(*arguments)
    jax.tree.map(np.testing.assert_array_equal, got, again)
    sums, grads = got
    assert all(x.dtype == low for x in sums)
    assert [x.dtype for x in grads] == [dtype, dtype, low]
    want_sums, want_grads = oracle(*arguments, case.z_loss, case.softcap)
    of_sums, of_grads = floors(*arguments)
    found = {
        "sums": errors(sums, want_sums, of_sums),
        "sums alone": errors((loss, *stats), want_sums, of_sums),
        "gradients": errors(grads, want_grads, of_grads),
    }
    exact = 1e-6 if dtype == jnp.bfloat16 else bound
    assert found["sums"] <= exact, found
    assert found["sums alone"] <= exact, found
    assert found["gradients"] <= bound, found
    return found
