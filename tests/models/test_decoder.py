"""Decoder against a plain numpy Llama; its layers, however they are grouped, scanned and recomputed."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from jaxllm.models import (
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    Llama3Scaling,
    MlpConfig,
    RopeConfig,
    Segments,
    functional,
    unstack_layers,
)
from tests import quick, tiny
from tests.models import numpy_llama


def run(config: DecoderConfig, params: Any, tokens: np.ndarray, positions: np.ndarray | None = None) -> np.ndarray:
    model = functional(config)
    if positions is None:
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)

    def logits(params: Any, tokens: Any, positions: Any) -> Any:
        hidden, _ = model.forward(params, tokens, positions, Segments())
        return model.head(params, hidden)

    return np.asarray(quick.jit(logits)(params, tokens, positions))


SMALL = {"embed_dim": 6, "head_dim": 4, "mlp": 10, "vocab_size": 11}
ARCHITECTURES = {
    "plain, tied, one layer": {"heads": 2, "kv_heads": 2, "layers": 1},
    "GQA 4 to 2, untied": {"heads": 4, "kv_heads": 2, "tied": False},
    "MQA 3 to 1, qk-norm, bias": {"heads": 3, "kv_heads": 1, "qk_norm": "head", "bias": "qkv"},
    "large eps, short wavelengths": {"heads": 2, "kv_heads": 1, "norm_eps": 0.1, "rope": RopeConfig(theta=3.0)},
    "rotated in part": {"heads": 2, "kv_heads": 1, "rope": RopeConfig(theta=5.0, fraction=0.5)},
    "gains less one": {"heads": 2, "kv_heads": 1, "norm": "rms_plus_one", "qk_norm": "head"},
    "qk-norm over all heads": {"heads": 4, "kv_heads": 2, "qk_norm": "all"},
    "scaled embeddings, bounded logits": {"heads": 2, "kv_heads": 1, "embed_scale": 2.5, "logit_softcap": 0.4},
}
ATTENTION = AttentionConfig(2, 1, 4, RopeConfig(10.0))
BLOCKS = {
    "window": BlockConfig(dataclasses.replace(ATTENTION, window=2), MlpConfig(5)),
    "soft-cap and scale": BlockConfig(dataclasses.replace(ATTENTION, softcap=0.3, scale=0.9), MlpConfig(5)),
    "clipped": BlockConfig(dataclasses.replace(ATTENTION, clip=0.3), MlpConfig(5)),
    "norms after": BlockConfig(ATTENTION, MlpConfig(5), "post"),
    "norms on both sides": BlockConfig(ATTENTION, MlpConfig(5, "gelu"), "sandwich"),
    "all biases": BlockConfig(dataclasses.replace(ATTENTION, bias="all"), MlpConfig(5, bias=True)),
    "no rotation, no gate": BlockConfig(dataclasses.replace(ATTENTION, rope=None), MlpConfig(5, "gelu_tanh", False)),
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_every_value_of_a_block_equals_numpy_and_matters(block, rng, float64):
    config = DecoderConfig(
        vocab_size=11, embed_dim=6, layers=2, pattern=(block,), dtype="float64", param_dtype="float64"
    )
    params = quick.params(config)
    tokens = rng.integers(0, 11, (2, 5))
    want = np.stack([numpy_llama.logits(config, params, row) for row in tokens])
    assert tiny.leaf_error(run(config, params, tokens), want) < 1e-12
    plain = BlockConfig(ATTENTION, MlpConfig(5, block.mlp.activation, block.mlp.gated, block.mlp.bias), block.norms)
    plain = dataclasses.replace(plain, attention=dataclasses.replace(ATTENTION, bias=block.attention.bias))
    if plain != block:
        other = dataclasses.replace(config, pattern=(plain,))
        assert tiny.leaf_error(run(other, params, tokens), want) > 1e-3


def test_layer_norms_and_learned_positions_equal_numpy(rng, float64):
    """GPT-2: no rotation, biases everywhere; positions are rows of a table."""
    block = BlockConfig(AttentionConfig(2, 2, 4, None, bias="all"), MlpConfig(5, "gelu_tanh", gated=False, bias=True))
    config = DecoderConfig(
        vocab_size=11,
        embed_dim=6,
        layers=2,
        pattern=(block,),
        norm="layer",
        learned_positions=9,
        dtype="float64",
        param_dtype="float64",
    )
    params = quick.params(config)
    tokens, positions = rng.integers(0, 11, (1, 4)), np.array([[5, 6, 7, 8]], np.int32)
    got = run(config, params, tokens, positions)[0]
    assert tiny.leaf_error(got, numpy_llama.logits(config, params, tokens[0], positions[0])) < 1e-12
    assert tiny.leaf_error(got, numpy_llama.logits(config, params, tokens[0])) > 1e-3


@pytest.mark.parametrize("fields", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_equals_numpy_in_float64(fields, rng, float64):
    config = tiny.decoder(**SMALL | fields)
    params = quick.params(config)
    tokens = rng.integers(0, config.vocab_size, (2, 5))
    got = run(config, params, tokens)
    assert got.dtype == np.float64
    want = np.stack([numpy_llama.logits(config, params, row) for row in tokens])
    assert tiny.leaf_error(got, want) < 1e-12


def test_a_mixture_of_blocks_equals_numpy(rng, float64):
    """Prefix, pattern and remainder, each block with its own heads, width, activation and rope; moved positions."""
    first = BlockConfig(AttentionConfig(1, 1, 6, RopeConfig(50.0)), MlpConfig(3, "gelu_tanh"))
    local = BlockConfig(AttentionConfig(4, 2, 4, RopeConfig(10.0)), MlpConfig(8))
    wide = BlockConfig(AttentionConfig(2, 1, 4, RopeConfig(1e4), qk_norm="head"), MlpConfig(5))
    config = DecoderConfig(
        vocab_size=11,
        embed_dim=6,
        layers=6,
        prefix=(first,),
        pattern=(local, wide),
        param_dtype="float64",
        dtype="float64",
    )
    assert config.blocks == (first, local, wide, local, wide, local)
    params = quick.params(config)
    tokens = rng.integers(0, 11, (1, 4))
    positions = np.array([[7, 8, 9, 10]], np.int32)
    got = run(config, params, tokens, positions)[0]
    assert tiny.leaf_error(got, numpy_llama.logits(config, params, tokens[0], positions[0])) < 1e-12


A, B, C = (BlockConfig(mlp=MlpConfig(hidden)) for hidden in (8, 16, 24))


@pytest.mark.parametrize(
    ("layers", "prefix", "pattern", "expected"),
    [
        (1, (), (A,), [((A,), 1)]),
        (5, (), (A,), [((A,), 5)]),
        (26, (), (A, A, A, A, A, B), [((A, A, A, A, A, B), 4), ((A, A), 1)]),  # Gemma 3: 4 x 6 + 2
        (61, (A,) * 3, (B,), [((A,), 3), ((B,), 58)]),  # DeepSeek V3: 3 dense + 58
        (2, (), (A, B, C), [((A, B), 1)]),  # not even one whole pattern
        (4, (A, B), (C,), [((A,), 1), ((B,), 1), ((C,), 2)]),
        (6, (A, B, B), (A, B), [((A,), 1), ((B,), 2), ((A, B), 1), ((A,), 1)]),
        (2, (A,), (A,), [((A,), 1), ((A,), 1)]),
    ],
)
def test_layers_fall_into_segments(layers, prefix, pattern, expected):
    config = DecoderConfig(layers=layers, prefix=prefix, pattern=pattern)
    assert list(config.segments) == expected
    assert len(config.blocks) == layers
    assert config.blocks == tuple(block for group, repeats in expected for block in group * repeats)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Recorder:
    """Attention context that records the calls in order; attention returns v of its own kv head."""

    seen: Any
    calls: Any

    def attend(self, layer, q, k, v, positions, scoring, sinks=None):
        seen = self.seen.at[self.calls].set(layer)
        return jnp.repeat(v, q.shape[2] // v.shape[2], axis=2), Recorder(seen, self.calls + 1)


@pytest.mark.parametrize("unroll", [0, 1, 2])
def test_every_layer_asks_with_its_own_number(unroll):
    blocks = tuple(BlockConfig(AttentionConfig(1, 1, 2), MlpConfig(hidden)) for hidden in (1, 2, 3))
    config = DecoderConfig(
        vocab_size=3, embed_dim=2, layers=9, prefix=blocks[:1], pattern=blocks, remat="full", unroll=unroll
    )
    model = functional(config)
    params = quick.params(config)
    context = Recorder(jnp.full(12, -1, jnp.int32), jnp.int32(0))
    tokens = jnp.zeros((1, 1), jnp.int32)
    _, context = quick.jit(model.forward)(params, tokens, tokens, context)
    assert context.seen.tolist() == [*range(9), -1, -1, -1]


def loss_of(config: DecoderConfig) -> Any:
    model = functional(config)

    def loss(params: Any, tokens: Any) -> Any:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        hidden, _ = model.forward(params, tokens, positions, Segments())
        return jnp.mean(jax.nn.logsumexp(model.head(params, hidden), -1) ** 2)

    return loss


@pytest.mark.drawn(0.3)
def test_scanned_unrolled_and_recomputed_are_the_same_function(rng, float64):
    plain = tiny.decoder(**SMALL, heads=2, kv_heads=1, layers=3)
    params = quick.params(plain)
    tokens = jnp.asarray(rng.integers(0, 11, (2, 4)), jnp.int32)
    results = {}
    for remat, unroll in (("none", 1), ("none", 0), ("elementwise", 1), ("full", 2)):
        loss = loss_of(dataclasses.replace(plain, remat=remat, unroll=unroll))
        traced = quick.jit(jax.value_and_grad(loss)).trace(params, tokens)
        results[remat, unroll] = traced.lower().compile()(params, tokens)
        # Each is really what it says.
        text = str(traced.jaxpr)
        assert ("remat" in text or "checkpoint[" in text) == (remat != "none")
        assert f"unroll={unroll or 3}" in text
    want = results.pop(("none", 1))
    for key, got in results.items():
        assert tiny.leaf_error(got, want) < 1e-13, key


@functools.cache
def mesh(text: str) -> Any:
    spec = sharding.MeshSpec.parse(text)
    return spec.build(jax.devices()[: spec.abstract().size])


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(("heads", "kv_heads", "on"), [(4, 2, "data=2,tensor=4"), (8, 1, "tensor=8")])
def test_fewer_kv_heads_than_tensor_shards_are_replicated_and_equal_one_device(heads, kv_heads, on, rng, float64):
    config = tiny.decoder(heads=heads, kv_heads=kv_heads, head_dim=2, qk_norm="head", bias="qkv", layers=2)
    model = functional(config)
    params = quick.params(config)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (2, 3)), jnp.int32)
    loss = loss_of(config)
    want = quick.jit(jax.value_and_grad(loss))(params, tokens)
    abstract = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh(on), model.rules)
    attention = abstract["segments"]["0"]["0"]["attention"]
    assert "tensor" in str(attention["q"].sharding.spec)
    for name in ("k", "v", "k_bias", "v_bias"):
        assert attention[name].sharding.is_fully_replicated, name
    with jax.set_mesh(mesh(on)):
        got = quick.jit(jax.value_and_grad(loss))(jax.device_put(params, sharding.shardings_of(abstract)), tokens)
    assert "tensor" in str(got[1]["segments"]["0"]["0"]["attention"]["q"].sharding.spec)
    assert tiny.leaf_error(got, want) < 1e-12


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"heads": 6}, r"0/0/attention/o: heads = 6 cannot be split 4 ways.*nearest are \[2, 3, 6\]"),
        ({"heads": 12, "kv_heads": 3}, "attention/k: kv_heads = 3 cannot be split 4 ways.*or a multiple of 3"),
        ({"mlp": 10}, r"mlp/down: mlp = 10 cannot be split 4 ways.*nearest are \[1, 2, 5\]"),
        ({"vocab_size": 63}, r"embedding/table: vocab = 63 cannot be split 4 ways.*nearest are \[1, 3, 7\]"),
    ],
)
def test_what_does_not_fit_the_mesh_is_refused_before_anything_is_allocated(fields, words):
    model = functional(tiny.decoder(**fields))
    with pytest.raises(sharding.ShardingError, match=words):
        sharding.abstract_params(model.abstract(), model.logical_axes(), mesh("data=2,tensor=4"), model.rules)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AttentionConfig(heads=6, kv_heads=4), r"kv_heads = 4 does not divide heads = 6; .*\[1, 2, 3, 6\]"),
        (lambda: AttentionConfig(heads=4, kv_heads=0), "kv_heads = 0"),
        (lambda: AttentionConfig(heads=0, kv_heads=1), "heads = 0"),
        (lambda: AttentionConfig(head_dim=7), "7 of 7 dimensions would be rotated; rotary pairs need an even number"),
        (lambda: AttentionConfig(head_dim=0), "head_dim = 0"),
        (lambda: MlpConfig(hidden=0), "hidden = 0"),
        (lambda: DecoderConfig(vocab_size=0), "vocab_size = 0"),
        (lambda: DecoderConfig(embed_dim=0), "embed_dim = 0"),
        (lambda: DecoderConfig(pattern=()), "pattern is empty"),
        (lambda: DecoderConfig(layers=0), "layers = 0 is too few.*at least 1"),
        (lambda: DecoderConfig(layers=2, prefix=(A, B)), "layers = 2 is too few.*prefix of 2.*at least 3"),
        (lambda: DecoderConfig(unroll=-1), "unroll = -1"),
    ],
)
def test_impossible_sizes_are_refused_in_a_sentence(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_llama3_scaling_reaches_the_model(rng, float64):
    """A scaled model differs from a plain one at far positions only: the setting is not ignored on the way."""
    fields = {**SMALL, "heads": 1, "kv_heads": 1, "layers": 1}
    scaling = Llama3Scaling(original_length=64)
    plain, scaled = (tiny.decoder(**fields, rope=RopeConfig(1e4, s)) for s in (None, scaling))
    params = quick.params(plain)
    tokens = rng.permutation(11)[None, :3]  # equal ones would be the same mean of values at any position
    far = np.array([[0, 50, 200]], np.int32)
    assert tiny.leaf_error(run(scaled, params, tokens, far), run(plain, params, tokens, far)) > 1e-6


def test_embed_blocks_and_head_compose_to_forward(rng):
    config = tiny.decoder(**SMALL, heads=2, kv_heads=1, dtype="float32", tied=False)
    model = functional(config)
    params = quick.params(config)
    tokens = jnp.asarray(rng.integers(0, 11, (2, 3)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (2, 3))

    @quick.jit
    def pieces(params: Any) -> Any:
        x = model.embed(params, tokens, positions)
        hidden, context = model.blocks(params, x, positions, Segments())
        whole, _ = model.forward(params, tokens, positions, Segments())
        assert context == Segments()
        return x, hidden, whole, model.unembed(params, hidden), model.head(params, hidden)

    x, hidden, whole, (normed, table), logits = pieces(params)
    np.testing.assert_array_equal(x, params["embedding"]["table"][tokens])
    np.testing.assert_array_equal(hidden, whole)
    np.testing.assert_array_equal(table, params["head"]["weight"])
    np.testing.assert_allclose(normed @ table.T, logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_layers_apart_are_the_same_model(remat, rng):
    """A prefix, a pattern of two with a remainder: five layers in three segments."""
    wide, narrow = BlockConfig(ATTENTION, MlpConfig(5)), BLOCKS["window"]
    config = DecoderConfig(11, 6, 6, prefix=(wide,), pattern=(narrow, wide), remat=remat)
    params = jax.tree.map(jnp.asarray, quick.params(config, seed=1))
    tokens = rng.integers(0, 11, (2, 7)).astype(np.int32)
    apart = unstack_layers(params)
    assert [len(segment) for segment in apart["segments"].values()] == [1, 2, 1]
    np.testing.assert_allclose(run(config, apart, tokens), run(config, params, tokens), rtol=2e-6, atol=2e-6)


def test_layers_taken_apart_give_their_stacks_back():
    params = jax.tree.map(jnp.asarray, quick.params(tiny.decoder(layers=3), seed=1))
    stacks, table = jax.tree.leaves(params["segments"]), params["embedding"]["table"]
    held = jax.tree.map(np.asarray, params["segments"])
    apart = unstack_layers(params, donate=True)
    assert all(stack.is_deleted() for stack in stacks)
    assert apart["embedding"]["table"] is table
    again = jax.tree.map(lambda *layers: np.stack(layers), *apart["segments"]["0"])
    jax.tree.map(np.testing.assert_array_equal, again, held["0"])
