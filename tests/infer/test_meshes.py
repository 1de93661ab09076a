"""Engine over a mesh: it serves the same as one device, and names what it refuses."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from jaxllm.infer import Engine, EngineConfig, Request, SamplingParams
from jaxllm.infer.embedder import Embedder
from jaxllm.infer.runner.paged_cache import LayerGroup
from jaxllm.infer.runner.serving_mesh import placements, serving_model, serving_rules
from jaxllm.infer.scheduling.policy_state import PolicyState
from jaxllm.infer.scheduling.replica_schedulers import ReplicaSchedulers
from jaxllm.infer.scheduling.scheduler import Scheduler
from jaxllm.infer.scheduling.sequence import Sequence
from jaxllm.infer.speculate.draft_length import FixedDraftLength
from jaxllm.models import functional
from jaxllm.models.attention_context import KVSpec
from tests import quick
from tests.infer import engines
from tests.infer.engines import LONGEST
from tests.infer.meshes import over
from tests.infer.paper import PaperRunner
from tests.infer.proposers import OracleProposer

SIZES = dataclasses.replace(engines.ENGINES["tight, swap"], max_sequences=2, max_batched_tokens=8, buckets=(8,))


def other_weights(model: str, seed: int) -> dict:
    return jax.tree.map(jnp.asarray, quick.params(engines.model_of(model, "float32"), seed=seed, scale=0.5))


@pytest.mark.drawn(0.3)
def test_a_mesh_serves_what_one_device_serves_with_weights_of_another_mesh(rng):
    engine = over("data=2,expert=2,tensor=2", "mixtral", SIZES)
    traffic = engines.traffic(rng, engine.config, 12)
    assert engines.error("mixtral", "float32", engines.serve(engine, traffic)) < 1e-3
    # A training state's, on the mesh it is trained on; a step of training then takes the state's buffers away.
    mesh, model = sharding.MeshSpec.parse("fsdp=4,tensor=2").build(), functional(engines.model_of("mixtral", "float32"))
    places = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    state = jax.device_put(other_weights("mixtral", 5), sharding.shardings_of(places))
    late = engine.runner.program_cache.counts.late  # type: ignore[attr-defined]
    prompt = rng.integers(0, engines.VOCAB, 9).tolist()
    request = engine.submit(prompt, SamplingParams(max_tokens=20, seed=1, logprobs=0))
    for _ in range(6):
        engine.step()
    engine.swap(state)
    jax.tree.map(lambda x: x.delete(), state)
    while engine.busy:
        engine.step()
    (sequence,) = request.sequences
    assert set(sequence.versions) == {0, 1}
    padded = np.zeros((1, engines.LONGEST), np.int32)
    padded[0, : len(sequence.tokens)] = sequence.tokens
    forward = engines._forward("mixtral", "float32")
    for version, weights in enumerate((engines.params_of("mixtral", "float32"), other_weights("mixtral", 5))):
        want = np.asarray(forward(weights, jnp.asarray(padded)))
        for i, made_by in enumerate(sequence.versions, len(prompt)):
            if made_by == version:
                np.testing.assert_allclose(
                    sequence.logprobs[i - len(prompt)], want[i - 1, sequence.tokens[i]], atol=1e-3
                )
    assert engine.runner.program_cache.counts.late == late  # type: ignore[attr-defined]


@pytest.mark.drawn(1)
def test_an_engine_of_one_device_needs_not_the_mesh_of_its_caller(rng):
    """Built and stepped within a mesh, as a training loop has one; in tight memory, so that pages are copied too."""
    with jax.set_mesh(sharding.MeshSpec.parse("data=8").build()):
        engine = engines.build(SIZES, "llama", "float32")
        served = engines.serve(engine, engines.traffic(rng, engine.config, 8))
    assert engines.error("llama", "float32", served) < 1e-3
    assert engine.runner.program_cache.counts.late == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("mesh", "model", "words"),
    [
        ("stage=2,data=2", "llama", r"stage=2 does not go with data=2: .*Give stage and tensor alone"),
        ("ulysses=2,tensor=2", "llama", r"does not serve over ulysses=2: .*use context instead"),
        ("context=2", "deepseek_v3", r"latent attention does not go with context=2"),
        ("tensor=8", "llama", r"heads = 4 cannot be split 8 ways \(tensor=8\)"),
        ("expert=8", "mixtral", r"experts = 4 cannot be split 8 ways \(expert=8\)"),
        ("tensor=3", "smollm2", r"vocab = 40 cannot be split 3 ways"),
    ],
)
def test_meshes_that_do_not_fit_are_refused_by_name(mesh: str, model: str, words: str):
    with pytest.raises(sharding.ShardingError, match=words):
        over(mesh, model, SIZES)


def test_equal_bits_do_not_go_with_split_experts():
    with pytest.raises(sharding.ShardingError, match="batch_invariant does not go with expert"):
        over("expert=2", "mixtral", engines.ENGINES["invariant"])
    with pytest.raises(sharding.ShardingError, match="batch_invariant does not go with context=2"):
        over("context=2", "llama", engines.ENGINES["invariant"])


def test_an_engine_of_one_process_follows_nobody():
    with pytest.raises(RuntimeError, match="follows nobody"):
        Engine(PaperRunner(SIZES, (LayerGroup(KVSpec(1, 1, 1), None, (0,)),), 20), SIZES, engines.VOCAB).follow()


def queued(replicas: ReplicaSchedulers, prompts: list[list[int]]) -> list[Sequence]:
    made = []
    for number, prompt in enumerate(prompts):
        request = Request(number, prompt, SamplingParams(max_tokens=4), b"", 0, frozenset())
        made.append(Sequence(request, 0, number, list(prompt)))
        replicas.add(made[-1])
    return made


def test_replicas_share_the_load_and_find_what_they_know(rng):
    config = EngineConfig(max_sequences=4, max_batched_tokens=64, max_len=LONGEST, page_size=8, pages=40)
    policy_state = PolicyState()
    replicas = ReplicaSchedulers(config, lambda: Scheduler(config, [None], [40], 8, 8, policy_state), 3, policy_state)
    first = queued(replicas, rng.integers(0, 99, (6, 20)).tolist())
    plans = replicas.plans()
    assert [len(plan.chunks) for plan in plans] == [2, 2, 2]
    assert {plan.steps for plan in plans} == {1}
    for sequence in first[:4]:
        replicas.finish(sequence)
    replicas.plans()
    # Two begin as texts that are known, the third as none: to the one that knows, and to one with little to do.
    known, other, new = queued(
        replicas, [[*first[4].tokens, 1], [*first[5].tokens, 2], rng.integers(0, 99, 20).tolist()]
    )
    replicas.plans()
    assert [known.replica, other.replica] == [first[4].replica, first[5].replica]
    assert known.computed > len(known.tokens) - 8 >= 8
    assert replicas.hit_tokens == 32
    assert new.replica in {0, 1, 2} - {first[4].replica, first[5].replica}
    # Many that begin alike do not all go to the one that knows their beginning.
    many = queued(replicas, [[*first[4].tokens, token] for token in range(20)])
    replicas.plans()
    loads = [len(one.sequences()) for one in replicas.schedulers]
    assert loads == [4, 4, 4]
    assert len(replicas.unassigned) == sum(s.slot < 0 and not s.pages for s in many) > 0
    for sequence in replicas.sequences():
        replicas.finish(sequence)
    assert replicas.idle
    assert all(pages.available == pages.count for pages in replicas.pages)


def test_replicas_run_equally_many_steps_whenever_drafting_begins(rng):
    """Lengths of drafts are chosen once a step: where one replica drafts, none decodes several steps."""
    asked: list[int] = []

    class Lengths(FixedDraftLength):
        def counts(self, sequences: list[Sequence]) -> dict[Sequence, int]:
            asked.append(len(sequences))
            return super().counts(sequences) if rng.random() < 0.3 else {}

    config = EngineConfig(
        max_sequences=4, max_batched_tokens=64, max_len=LONGEST, page_size=8, pages=40, decode_steps=4, verify_tokens=2
    )
    state, oracle = PolicyState(), OracleProposer("silent", rng, 99)
    oracle.propose = lambda sequence, count: [0] * count

    def one() -> Scheduler:
        return Scheduler(config, [None], [40], 8, 8, state, proposer=oracle, draft_length=Lengths(2))

    replicas, seen = ReplicaSchedulers(config, one, 2, state), set[tuple[int, bool]]()
    for sequence in queued(replicas, rng.integers(0, 99, (4, 8)).tolist()):
        sequence.request.params = SamplingParams(max_tokens=50)
    for _ in range(12):
        asked.clear()
        plans = replicas.plans()
        chunks = [(plan.steps, chunk) for plan in plans for chunk in plan.chunks]
        assert len(asked) == 2
        assert len({steps for steps, _ in chunks}) == 1
        seen.add((chunks[0][0], any(chunk.proposed for _, chunk in chunks)))
        for steps, chunk in chunks:  # all drafts are refused
            sequence, refused = chunk.sequence, len(chunk.proposed)
            sequence.pending -= steps + refused
            replicas.settle(sequence, refused)
            sequence.tokens += [0] * steps
    assert seen == {(1, False), (4, False), (1, True)}


@pytest.mark.drawn(0.3)
def test_a_replica_that_stops_early_keeps_its_pages(rng, float64):
    """While the other replica decodes on, nothing is written to the pages of sequences that have stopped."""
    sizes = dataclasses.replace(
        SIZES, max_sequences=1, page_size=4, pages=40, decode_steps=16, prefix_cache=True, max_batched_tokens=16,
        buckets=(16,),
    )  # fmt: skip
    engine = over("data=2", "llama", sizes, "float64")
    prompts = rng.integers(0, engines.VOCAB, (2, 11)).tolist()
    greedy = SamplingParams(max_tokens=20, temperature=0.0, logprobs=0)
    free = engines.serve(engine, [{"prompt": prompt, "params": greedy} for prompt in prompts])
    stop = free[0].sequences[0].tokens[13]
    asked = [dataclasses.replace(greedy, stop_ids=(stop,)), greedy]
    for _ in range(2):  # the second time it finds what the first has left in the prefix cache
        made = engines.serve(engine, [{"prompt": p, "params": one} for p, one in zip(prompts, asked, strict=True)])
        assert engines.error("llama", "float64", made) <= 1e-10
        assert len(made[0].sequences[0].tokens) < 20
    assert engine.scheduler.hit_tokens > 0


def test_a_text_has_the_same_vector_on_a_mesh(rng):
    model, params = functional(engines.model_of("mixtral", "float32")), engines.params_of("mixtral", "float32")
    mesh = sharding.MeshSpec.parse("data=2,expert=2,tensor=2").build()
    made, ids = serving_model(model), rng.integers(0, engines.VOCAB, 11).tolist()
    placed = jax.device_put(params, placements(made, params, mesh))
    one, other = Embedder(model, params, LONGEST), Embedder(model, placed, LONGEST, mesh)
    np.testing.assert_allclose(other(ids, "mean"), one(ids, "mean"), atol=1e-5)


def test_a_weight_is_stored_split_over_fsdp_alone():
    rules = serving_rules(sharding.DEFAULT)
    mesh = sharding.MeshSpec.parse("data=2,fsdp=2,expert=2,tensor=2").abstract()
    assert rules.spec(("embed", "heads", "head_dim"), mesh) == jax.P("fsdp", "tensor", None)
    assert rules.spec(("experts", "expert_embed", "expert_mlp"), mesh) == jax.P("expert", "fsdp", "tensor")
