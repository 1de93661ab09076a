"""Loss against a plain log-softmax in numpy: which targets count, accumulation, memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import DecoderConfig, functional
from jaxllm.train import loss_sums, value_and_grad
from tests import environment, quick, tiny
from tests.models import numpy_llama

CONFIG = tiny.decoder(vocab_size=13, embed_dim=6, heads=2, kv_heads=1, head_dim=4, mlp=10, layers=1)


def plain(config: DecoderConfig, params: Any, batch: Any) -> tuple[float, float, int]:
    """Summed nll, summed squared log-partition, targets: token by token, document by document."""
    nll, z, count = 0.0, 0.0, 0
    for row in range(batch.tokens.shape[0]):
        for segment in set(batch.segment_ids[row]) - {0}:
            inside = batch.segment_ids[row] == segment
            logits = numpy_llama.logits(config, params, batch.tokens[row, inside])
            for scores, target in zip(logits, batch.targets[row, inside], strict=True):
                if target >= 0:
                    partition = np.log(np.exp(scores).sum())
                    nll, z, count = nll + partition - scores[target], z + partition**2, count + 1
    return nll, z, count


@pytest.mark.parametrize("packed", [False, True])
def test_sums_equal_a_plain_log_softmax(packed, float64):
    params, batch = quick.params(CONFIG), tiny.batch(3, 3, 6, 13, packed=packed, padding=packed)
    nll, z, count = plain(CONFIG, params, batch)
    assert 0 < count < batch.targets.size, "some tokens have no target"
    for weight in (0.0, 0.01):
        sums = quick.jit(lambda params, batch, w=weight: loss_sums(functional(CONFIG), params, batch, z_loss=w))(
            params, batch
        )
        assert float(sums.nll) == pytest.approx(nll, rel=1e-12)
        assert float(sums.z) == pytest.approx(z, rel=1e-12)
        assert float(sums.loss) == pytest.approx(nll + weight * z, rel=1e-12)
        assert float(sums.count) == count


def test_tokens_without_a_target_have_no_influence_on_their_loss(float64):
    """Tokens at the end of a row whose targets are -1 are never read."""
    params, batch = quick.params(CONFIG), tiny.batch(3, 2, 6, 13, packed=False)
    targets = batch.targets.copy()
    targets[:, 3:] = -1
    other = batch.tokens.copy()
    other[:, 3:] = (other[:, 3:] + 5) % 13
    run = quick.jit(value_and_grad(functional(CONFIG)))
    want, got = (run(params, batch._replace(tokens=tokens, targets=targets)) for tokens in (batch.tokens, other))
    assert float(want[0].nll) == pytest.approx(float(got[0].nll), rel=1e-14)
    table = [np.asarray(grads["segments"]["0"]["0"]["mlp"]["up"]) for _, grads in (want, got)]
    np.testing.assert_allclose(*table, rtol=0, atol=1e-14)


def test_a_batch_without_targets_has_no_gradient_and_no_nan(float64):
    params, batch = quick.params(CONFIG), tiny.batch(3, 2, 6, 13, packed=False)
    nothing = batch._replace(targets=np.full_like(batch.targets, -1))
    sums, grads = quick.jit(value_and_grad(functional(CONFIG), z_loss=0.1))(params, nothing)
    assert (float(sums.loss), float(sums.count)) == (0.0, 0.0)
    for leaf in jax.tree.leaves(grads):
        np.testing.assert_array_equal(leaf, 0)


@pytest.mark.parametrize("accumulate", [2, 6])
def test_accumulation_does_not_change_the_gradients(accumulate, float64):
    """Though the micro-batches have unequal numbers of targets, one of them none at all."""
    params, batch = quick.params(CONFIG), tiny.batch(4, 6, 5, 13, packed=True)
    targets = batch.targets.copy()
    targets[1, 1:] = -1
    targets[5] = -1
    batch = batch._replace(targets=targets)
    model = functional(CONFIG)
    whole, parts = (quick.jit(value_and_grad(model, z_loss=0.01, accumulate=n))(params, batch) for n in (1, accumulate))
    assert tiny.leaf_error(parts, whole) < 1e-13
    # They are those of the mean over targets.
    nll, z, count = plain(CONFIG, params, batch)
    assert float(whole[0].loss / whole[0].count) == pytest.approx((nll + 0.01 * z) / count, rel=1e-12)


def test_gradients_are_those_of_the_mean_loss(float64):
    """Slope along a random direction, by central differences."""
    params, direction = quick.params(CONFIG), quick.params(CONFIG, seed=1)
    batch = tiny.batch(5, 2, 5, 13, packed=True)
    model = functional(CONFIG)
    mean = quick.jit(lambda params, batch: (s := loss_sums(model, params, batch, z_loss=0.1)).loss / s.count)
    _, grads = quick.jit(value_and_grad(model, z_loss=0.1))(params, batch)
    h = 1e-5
    ends = [mean(jax.tree.map(lambda p, d, s=sign: p + s * h * d, params, direction), batch) for sign in (-1, 1)]
    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: float((g * d).sum()), grads, direction)))
    assert float(ends[1] - ends[0]) / (2 * h) == pytest.approx(slope, rel=1e-7)


def temp_bytes(config: DecoderConfig, rows: int, seq_len: int) -> int:
    """Scratch memory of the compiled loss and gradients."""
    model = functional(config)
    spec = jax.ShapeDtypeStruct((rows, seq_len), jnp.int32)
    batch = type(tiny.batch(0, 1, 2, 2, packed=False))(spec, spec, spec, spec)
    compiled = jax.jit(value_and_grad(model)).lower(model.abstract(), batch).compile(environment.AS_EVER)
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.drawn(0.3)
def test_the_logits_are_never_held_whole():
    """Four times the tokens on 8,192 words are 96 MiB more logits; they are made an eighth at a time."""
    config = dataclasses.replace(CONFIG, vocab_size=8192, dtype="float32", param_dtype="float32")
    seq_len, few, many = 8, 128, 512
    logits = 4 * (many - few) * seq_len * config.vocab_size
    growth = temp_bytes(config, many, seq_len) - temp_bytes(config, few, seq_len)
    assert growth < logits / 6, f"{growth / 2**20:.1f} MiB more scratch for {logits / 2**20:.1f} MiB more logits"
