"""MLA latents in slices (TPLA): refusals, rotations, prompts of one token, weights that are swapped in."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from jaxllm.cli.model_loading import check_mla
from jaxllm.infer import Engine, EngineConfig, SamplingParams
from jaxllm.infer.runner.latent_rotation import ROTATIONS, LatentRotation
from jaxllm.models import BlockConfig, DecoderConfig, MLAConfig, MlpConfig, functional, unstack_layers
from tests import quick
from tests.infer import engines, sliced_latents

LAYER = MLAConfig(4, latent=8, nope_dim=6, rope_dim=4, value_dim=6)
MODEL = DecoderConfig(20, 16, 1, pattern=(BlockConfig(LAYER, MlpConfig(8)),), dtype="float64", param_dtype="float64")
TEXT = np.arange(24).reshape(2, 12) % 20


@pytest.mark.parametrize(
    "fields",
    [
        {"adapter_slots": 2},
        {"retention": "window+sinks", "prefix_cache": False},
        {"kv_dtype": "kivi4"},
        {"kv_dtype": "bfp4"},
        {"head_clusters": 2},
        {"chunk_cache": True},
        {"two_phase": True},
        {"overlap": "iso"},
        {"speculate": "ngram:2"},
        {"layer_window": 1},
        {"stages": 2},
        {"pools": "prefill=tensor:2 x1, decode=tensor:2 x1"},
    ],
)
def test_combinations_that_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="mla = 'tpla' does not go with"):
        EngineConfig(mla="tpla", **fields)  # type: ignore[arg-type]


def test_values_and_meshes_that_are_refused() -> None:
    with pytest.raises(ValueError, match="legal: exact, tpla, tpla:hadamard, tpla:pca, tpla:none"):
        EngineConfig(mla="sliced")
    for mesh in (None, "data=8"):
        with pytest.raises(ValueError, match="the mesh has none: give tensor=2 or more"):
            check_mla("tpla", mesh)
    check_mla("exact", None)
    check_mla("tpla:hadamard", "data=4,tensor=2")
    with pytest.raises(ValueError, match="the mesh has none"):
        engines.build(dataclasses.replace(engines.ENGINES["roomy"], mla="tpla"), "deepseek_v3")


def test_models_that_are_refused() -> None:
    model, params = functional(MODEL), quick.params(MODEL)
    with pytest.raises(ValueError, match="the model has none"):
        LatentRotation(functional(engines.model_of("llama", "float32")), {}, 2, "pca", TEXT)
    with pytest.raises(ValueError, match=r"latents of \[8\], which tensor=3 does not divide"):
        LatentRotation(model, params, 3, "pca", TEXT)
    with pytest.raises(ValueError, match="there are layers apart"):
        LatentRotation(model, unstack_layers(jax.tree.map(jnp.asarray, params)), 2, "pca", TEXT)
    with pytest.raises(ValueError, match="LayerNorms"):
        LatentRotation(functional(dataclasses.replace(MODEL, norm="layer")), params, 2, "pca", TEXT)
    with pytest.raises(ValueError, match="slices = 3 do not divide latent = 8"):
        dataclasses.replace(LAYER, slices=3)


@pytest.mark.parametrize("latent", [1, 7, 8, 12, 96])
def test_rotations_are_orthogonal(latent: int, rng: np.random.Generator) -> None:
    x = rng.normal(size=(200, latent)) * np.arange(1, latent + 1)
    for kind, make in ROTATIONS.items():
        rotation = make(x.T @ x)
        np.testing.assert_allclose(rotation @ rotation.T, np.eye(latent), atol=1e-12)
        sizes = np.square(x @ rotation).sum(axis=0)
        if kind == "pca":
            assert (np.diff(sizes) <= 1e-9 * sizes[0]).all()
    # A single large channel is the same in every element, which is what slices want of it.
    if latent & (latent - 1) == 0:
        np.testing.assert_allclose(np.abs(ROTATIONS["hadamard"](x.T @ x)), latent**-0.5, atol=1e-12)


@pytest.mark.drawn(1)
def test_prompts_attend_exactly_and_swapped_weights_are_rotated(float64: None) -> None:
    config = EngineConfig(
        max_sequences=2, max_batched_tokens=8, pages=20, page_size=4, buckets=(8,), decode_steps=3, max_len=24,
        samplers=("full",), mla="tpla",
    )  # fmt: skip
    first, second = (jax.tree.map(jnp.asarray, quick.params(MODEL, seed=seed, scale=0.5)) for seed in (1, 2))
    mesh = sharding.MeshSpec.parse("tensor=2").build(jax.devices()[:2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        engine = Engine.of(functional(MODEL), first, config, mesh=mesh, strict=True)
    folding = engine.folding
    assert isinstance(folding, LatentRotation)
    reference = sliced_latents.logprobs(folding.model, 24)
    for params in (first, second):
        if params is second:
            engine.swap(second)
        folded = folding.fold(params)
        # A prompt of one token, one in chunks, and one of which the prefix cache has all but the last token.
        for prompt in ([3], [*range(13)], [*range(12), 5]):
            request = engine.submit(prompt, SamplingParams(max_tokens=9, temperature=0.0, logprobs=0))
            while engine.busy:
                engine.step()
            (sequence,) = request.sequences
            want = reference(folded, sequence.tokens, len(prompt))
            at = np.arange(len(prompt), len(sequence.tokens))
            np.testing.assert_allclose(
                sequence.logprobs, want[at - 1, np.asarray(sequence.tokens)[at]], rtol=0, atol=1e-10
            )
            assert sequence.completion == want[at - 1].argmax(axis=1).tolist()
