"""Layer-parallel drafts: approximate while tokens are drafted, exact in what is known; spread over devices or not."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.infer import Engine
from jaxllm.infer.engine.engine_metrics import EngineMetrics
from jaxllm.infer.runner.dense_cache import DenseCache, empty_cache
from jaxllm.infer.scheduling.sequence import Sequence
from jaxllm.infer.speculate.layer_parallel_draft import LayerParallelProposer
from jaxllm.models import functional
from tests import environment, quick, tiny
from tests.infer import engines
from tests.infer.proposers import OracleProposer
from tests.infer.test_speculation import sequence
from tests.infer.test_verification import asked, equal, plainly_sampled

DEEP = tiny.decoder(vocab_size=engines.VOCAB, layers=4)
"""A draft of four layers of one kind."""


def params_of(seed: int = 6) -> Any:
    return jax.tree.map(jnp.asarray, quick.params(DEEP, seed=seed, scale=0.5))


@pytest.fixture(scope="module")
def verifying():
    """An engine in float64 that runs out of pages, and its proposer."""
    oracle = OracleProposer("silent", np.random.default_rng(environment.seed()), engines.VOCAB)
    config = dataclasses.replace(engines.ENGINES["tight, recompute"], max_sequences=2, decode_steps=1, verify_tokens=4)
    with environment.x64():
        return engines.build(config, "llama", "float64", proposer=oracle)


def placed(tokens: list[int], slot: int) -> Sequence:
    """A sequence in a slot of the batch, greedy in the first."""
    one = sequence(tokens)
    one.slot = slot
    if slot == 0:
        one.request.params = dataclasses.replace(one.request.params, temperature=0.0)
    return one


def exact_cache(tokens: list[int]) -> DenseCache:
    """Keys and values by a pass of the draft model over these tokens."""
    model, cache = functional(DEEP), empty_cache(DEEP, 1, len(tokens))
    row = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    _, cache = jax.jit(model.forward)(params_of(), jnp.asarray([tokens], jnp.int32), row, cache)
    return cache


def cache_error(proposer: LayerParallelProposer, one: Sequence, tokens: list[int]) -> float:
    """The largest difference of a slot's keys and values from those of an exact pass."""
    want = exact_cache(tokens)
    held = (np.asarray(x)[:, one.slot, : len(tokens)] for x in proposer._cache)
    layers = device_order(proposer)
    return max(
        float(np.abs(have - np.asarray(right)[layers, 0]).max())
        for have, right in zip(held, (want.k, want.v), strict=True)
    )


def device_order(proposer: LayerParallelProposer) -> list[int]:
    """Layers in the order of the rows of the KV cache: those of each device follow one another."""
    each = proposer._parallel // proposer._ways
    groups = range(DEEP.layers // proposer._parallel) if proposer._ways > 1 else range(0)
    spread = [g * proposer._parallel + d * each + i for d in range(proposer._ways) for g in groups for i in range(each)]
    return spread or list(range(DEEP.layers))


def rounds(proposer: LayerParallelProposer, rng: np.random.Generator) -> list[Any]:
    """Drafts of two sequences, of which some tokens are accepted; what is known is recalibrated after each."""
    many = [placed(rng.integers(0, engines.VOCAB, n).tolist(), slot) for slot, n in enumerate((5, 19))]
    drafts = []
    for _ in range(5):
        known = [list(one.tokens) for one in many]
        found = proposer.propose_all([(one, 4) for one in many])
        if any(draft is None for draft in found):
            continue
        for one, tokens in zip(many, known, strict=True):
            assert cache_error(proposer, one, tokens) <= 1e-10
        drafts.append(found)
        for one, draft in zip(many, found, strict=True):
            assert draft is not None
            wrong = int(rng.integers(engines.VOCAB))
            one.tokens += [*draft[: int(rng.integers(len(draft) + 1))], wrong]
    assert len(drafts) >= 4
    return drafts


@pytest.mark.drawn(0.5)
def test_one_layer_at_a_time_is_the_draft_model(verifying: Engine, float64):
    """The same tokens, greedy and sampled, as a draft model with a paged KV cache samples."""
    ordinary = engines.draft(verifying, DEEP, params_of())
    single = engines.layer_parallel_draft(verifying, DEEP, params_of(), 1)
    rng = np.random.default_rng(3)
    many = [placed(rng.integers(0, engines.VOCAB, n).tolist(), slot) for slot, n in enumerate((3, 6))]
    for _ in range(4):
        wanted = [(one, 4) for one in many]
        want, got = ordinary.propose_all(wanted), single.propose_all(wanted)
        assert None not in want
        assert got == want
        for one, draft in zip(many, got, strict=True):
            assert draft is not None
            one.tokens += draft[:2] if one.slot else draft[:1]


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("parallel", [2, 3])
def test_known_tokens_have_exact_keys_and_values(verifying: Engine, parallel, float64):
    """After a draft that is not what the model itself drafts; a group of three and one of one too."""
    proposer = engines.layer_parallel_draft(verifying, DEEP, params_of(), parallel)
    one = placed([3, 1, 4, 1, 5], 0)
    (draft,) = proposer.propose_all([(one, 4)])
    assert draft is not None
    assert cache_error(proposer, one, [*one.tokens, *draft[:3]]) > 1e-3, "drafted tokens are approximate"
    drafts = rounds(proposer, np.random.default_rng(parallel))
    exact = rounds(engines.layer_parallel_draft(verifying, DEEP, params_of(), 1), np.random.default_rng(parallel))
    assert drafts != exact


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(("parallel", "devices"), [(2, 2), (4, 2), (4, 4)])
def test_over_devices_they_draft_the_same(verifying: Engine, parallel, devices, float64):
    """Each device has its layers' weights and keys and values; an exact pass goes from one to the next."""
    alone = engines.layer_parallel_draft(verifying, DEEP, params_of(), parallel)
    spread = engines.layer_parallel_draft(verifying, DEEP, params_of(), parallel, devices)
    drafts = [rounds(one, np.random.default_rng(5)) for one in (alone, spread)]
    assert drafts[0] == drafts[1]
    weight = spread._params["layers"]["mlp"]["up"]
    assert weight.sharding.shard_shape(weight.shape)[1] == parallel // devices
    assert spread.device_bytes < alone.device_bytes
    assert spread.program_cache.counts.late == 0


@pytest.mark.drawn(0.5)
def test_completions_are_those_of_plain_decoding(verifying: Engine, rng, float64):
    """Short of pages, for a draft with layers of several kinds; fewer are right than of the exact draft."""
    requests, plain = asked(rng, verifying.config, 2), plainly_sampled(rng)
    want = [engines.serve(verifying, some) for some in (requests, plain)]
    shares = []
    for parallel in (1, 2):
        proposer = engines.layer_parallel_draft(
            verifying, engines.MODELS["llama"], engines.params_of("llama", "float64"), parallel
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verifying.scheduler, "proposer", proposer)
            equal(engines.serve(verifying, requests), want[0])
            patch.setattr(verifying, "metrics", EngineMetrics())
            equal(engines.serve(verifying, plain), want[1])
            shares.append(verifying.metrics.accepted_tokens / verifying.metrics.proposed_tokens)
        assert proposer.program_cache.counts.late == 0
    assert shares[0] == 1 > shares[1]


def test_what_cannot_be_spread_is_refused(verifying: Engine, float64):
    for parallel, devices, message in (
        (3, 2, "parallel = 3 is no multiple of 2 devices"),
        (3, 3, "the draft has 4 layers, no multiple of parallel = 3"),
    ):
        with pytest.raises(ValueError, match=message):
            engines.layer_parallel_draft(verifying, DEEP, params_of(), parallel, devices)
    gemma = engines.model_of("gemma3", "float64")
    with pytest.raises(ValueError, match="the draft has layers of several kinds"):
        engines.layer_parallel_draft(verifying, gemma, engines.params_of("gemma3", "float64"), 2, 2)
