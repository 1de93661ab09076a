"""Retaining heads: what they learn, that nothing else is trained, and the engine that evicts by their scores."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm.data.batch import Batch
from jaxllm.infer import SamplingParams
from jaxllm.infer.runner.paged_cache import retention_rule
from jaxllm.infer.runner.retention.head_files import load_heads, save_heads
from jaxllm.infer.runner.retention.locret import Locret
from jaxllm.models import functional
from jaxllm.models.retaining_heads import RetainingHeads, head_loss, importance, input_dim, new_heads
from jaxllm.posttrain.frozen.retention_training import HeadsRunConfig, head_step
from recipes.locret import locret_smollm2
from tests.infer import engines, meshes
from tests.seams.dense_reference import DenseReference, error
from tests.seams.score_reference import ScoreReference


def random_heads(model: str, rng: np.random.Generator) -> RetainingHeads:
    """Heads with random numbers, so that scores differ."""
    zeros = new_heads(engines.model_of(model, "float64"), 5, 0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), zeros)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(("way", "model"), [("tight, recompute", "llama"), ("tight, swap", "smollm2")])
def test_entries_leave_by_trained_scores(way, model, rng, float64, tmp_path):
    """However prompts are split and sequences preempted: what one query at a time over the whole sequence gives."""
    heads = random_heads(model, rng)
    save_heads(heads, tmp_path / "heads.safetensors")
    keep = f"locret:{tmp_path / 'heads.safetensors'},7,3,8"
    sizes = dataclasses.replace(engines.ENGINES[way], prefix_cache=False, retention=keep)
    engine = engines.build(sizes, model, "float64")
    long = SamplingParams(max_tokens=30, temperature=0.0, logprobs=0)
    asked = [{"prompt": rng.integers(0, engines.VOCAB, n).tolist(), "params": long} for n in (33, 21, 30, 9, 26)]
    made = engines.serve(engine, asked)
    assert engine.metrics.dropped_entries > 0
    rule = retention_rule(keep)
    assert isinstance(rule, Locret)
    assert error(model, ScoreReference((rule,), HashableHeads(heads)), made) <= 1e-10
    assert error(model, DenseReference(), made) > 1e-4


class HashableHeads:
    """Heads that a cached function may be called with."""

    def __init__(self, heads: RetainingHeads):
        self.score = heads.score


jax.tree_util.register_static(HashableHeads)


def test_labels_are_the_largest_later_scores(rng):
    """By a loop; a last token and padding have no label, and no other document counts."""
    q, k = (jnp.asarray(rng.normal(size=(1, 7, n, 4)), jnp.float32) for n in (4, 2))
    segments = jnp.asarray([[1, 1, 1, 2, 2, 0, 0]])
    ends = {0: 3, 1: 3, 2: 3, 3: 5, 4: 5}
    for distance, s, g in itertools.product((1, 2), range(7), range(2)):
        made = np.asarray(importance(q, k, 0.5, distance, segments))[0, s, g]
        later = range(s + distance, ends.get(s, s))
        want = [0.5 * float(q[0, t, n] @ k[0, s, g]) for t in later for n in (2 * g, 2 * g + 1)]
        np.testing.assert_allclose(made, max(want, default=-np.inf), rtol=1e-5)


def test_loss_of_heads():
    """Smooth L1 of the tokens with a label, and the squares of neighbours' differences."""
    scores, wanted = jnp.asarray([[[0.0], [0.5], [3.0]]]), jnp.asarray([[[0.0], [1.0], [-jnp.inf]]])
    np.testing.assert_allclose(head_loss(scores, wanted, 0.1), (0.5 * 0.25 + 0.1 * 0.25) / 2, rtol=1e-6)


def test_heads_learn_and_nothing_else_changes(rng):
    """The loss falls on one batch; only the heads are among what a step returns."""
    config = engines.model_of("llama", "float32")
    heads, rule = new_heads(config, 16, 0), optax.adam(3e-2)
    tokens = rng.integers(0, engines.VOCAB, (2, 24)).astype(np.int32)
    batch = Batch(tokens, tokens, np.ones_like(tokens), np.tile(np.arange(24, dtype=np.int32), (2, 1)))
    step = jax.jit(head_step(functional(config), rule, 0.0, 1))
    params, state, losses = dict(vars(heads)), rule.init(dict(vars(heads))), []
    for _ in range(40):
        arrays = jax.tree.map(jnp.asarray, batch)
        params, state, metrics = step(params, state, engines.params_of("llama", "float32"), arrays)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]
    assert set(params) == set(vars(heads))


def test_files_of_heads_that_do_not_fit(tmp_path, rng):
    config, path = engines.model_of("llama", "float32"), tmp_path / "heads.safetensors"
    save_heads(random_heads("smollm2", rng), path)
    with pytest.raises(ValueError, match="and this model needs"):
        load_heads(path, config)
    with pytest.raises(ValueError, match="cannot be read"):
        load_heads(tmp_path / "none.safetensors", config)
    with pytest.raises(ValueError, match="grouped-query attention of the same sizes"):
        input_dim(engines.model_of("deepseek_v3", "float32"))
    for wrong in ("locret", "locret:", "locret:heads.bin", f"locret:{path},3,4", f"locret:{path}x"):
        with pytest.raises(ValueError, match=r"give locret:HEADS\.safetensors"):
            retention_rule(wrong)
    save_heads(random_heads("llama", rng), path)
    sizes = dataclasses.replace(engines.ENGINES["roomy"], prefix_cache=False, retention=f"locret:{path}")
    with pytest.raises(ValueError, match="devices have parts of them"):
        meshes.over("tensor=2", "llama", sizes)


def test_settings_that_are_not_read():
    run = locret_smollm2()
    assert isinstance(run, HeadsRunConfig)
    with pytest.raises(ValueError, match="accumulate = 2, which the training of retaining heads does not read"):
        dataclasses.replace(run, accumulate=2)
    with pytest.raises(ValueError, match="distance = 512; give"):
        dataclasses.replace(run, distance=512)
    with pytest.raises(ValueError, match="give init_from"):
        dataclasses.replace(run, init_from="")
