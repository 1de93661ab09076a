"""An engine over a mesh: what it serves is what one device serves, and what it cannot serve on it says by name."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from jaxllm.infer import SamplingParams
from jaxllm.infer.placing import serving_rules
from jaxllm.models import functional
from tests import quick
from tests.infer import engines
from tests.infer.meshes import over

SIZES = dataclasses.replace(engines.ENGINES["tight, swap"], sequences=2, budget=8, buckets=(8,))


def other_weights(model: str, seed: int) -> dict:
    return jax.tree.map(jnp.asarray, quick.params(engines.model_of(model, "float32"), seed=seed, scale=0.5))


def test_a_mesh_serves_what_one_device_serves_with_weights_of_another_mesh(rng):
    engine = over("data=2,expert=2,tensor=2", "mixtral", SIZES)
    traffic = engines.traffic(rng, engine.config, 12)
    assert engines.error("mixtral", "float32", engines.serve(engine, traffic)) < 1e-3
    # A training state's, on the mesh it is trained on; a step of training then takes the state's buffers away.
    mesh, model = sharding.MeshSpec.parse("fsdp=4,tensor=2").build(), functional(engines.model_of("mixtral", "float32"))
    places = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    state = jax.device_put(other_weights("mixtral", 5), sharding.shardings_of(places))
    late = engine.device.manifest.counts.late  # type: ignore[attr-defined]
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
    assert engine.device.manifest.counts.late == late  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("mesh", "model", "words"),
    [
        ("stage=2", "llama", r"does not serve over stage=2: .*split heads over tensor instead"),
        ("context=2,tensor=2", "llama", r"does not serve over context=2: .*use data instead"),
        ("tensor=8", "llama", r"heads = 4 cannot be split 8 ways \(tensor=8\)"),
        ("expert=8", "mixtral", r"experts = 4 cannot be split 8 ways \(expert=8\)"),
        ("tensor=3", "smollm2", r"vocab = 40 cannot be split 3 ways"),
    ],
)
def test_meshes_that_do_not_fit_are_refused_by_name(mesh: str, model: str, words: str):
    with pytest.raises(sharding.ShardingError, match=words):
        over(mesh, model, SIZES)


def test_a_weight_is_stored_split_over_fsdp_alone():
    rules = serving_rules(sharding.DEFAULT)
    mesh = sharding.MeshSpec.parse("data=2,fsdp=2,expert=2,tensor=2").abstract()
    assert rules.spec(("embed", "heads", "head_dim"), mesh) == jax.P("fsdp", "tensor", None)
    assert rules.spec(("experts", "expert_embed", "expert_mlp"), mesh) == jax.P("expert", "fsdp", "tensor")
