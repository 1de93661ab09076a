"""Generation: the training forward's tokens, whatever the block, the batch, the cache or the mesh."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from jaxllm.infer import DenseCache, Generator, empty_cache
from jaxllm.infer.generate import BUCKET, bucket, decode
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig, Segments, functional
from tests import quick, tiny

CONFIG = tiny.decoder(dtype="float32", vocab_size=32, heads=4, kv_heads=2, layers=2, qk_norm="head")
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [8, 4]]


@functools.cache
def params() -> Any:
    # Scaled up, so that the next token is neither certain nor a toss-up.
    return jax.tree.map(jnp.asarray, quick.params(CONFIG, seed=4, scale=0.7))


def make(model: Any, params: Any, block: int = 8, vocab_size: int | None = None) -> Generator:
    """A generator whose programs compile fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        return Generator(model, params, block=block, vocab_size=vocab_size)


@functools.cache
def generator(block: int = 8) -> Generator:
    return make(functional(CONFIG), params(), block)


def write(prompts: list[list[int]], max_tokens: int, *, block: int = 8, **options: Any) -> np.ndarray:
    """All new tokens [B max_tokens]."""
    return np.concatenate(list(generator(block).stream(prompts, max_tokens, **options)), axis=1)


@quick.jit
def full(params: Any, tokens: Any) -> Any:
    """Logits of whole rows, without a cache."""
    model = functional(CONFIG)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, _ = model.forward(params, tokens, positions, Segments())
    return model.head(params, hidden)


def assert_greedy(prompt: list[int], made: np.ndarray) -> None:
    """Each token is the likeliest after those before it, by the forward without a cache."""
    text = np.array([*prompt, *made])
    padded = np.zeros((1, bucket(len(text))), np.int32)
    padded[0, : len(text)] = text
    logits = np.asarray(full(params(), padded))[0, len(prompt) - 1 : len(text) - 1]
    top = np.sort(logits, axis=-1)
    sure = top[:, -1] - top[:, -2] > 1e-4  # a tie within rounding may go either way
    assert sure.mean() > 0.9
    np.testing.assert_array_equal(made[sure], logits.argmax(-1)[sure])


def test_temperature_zero_takes_the_likeliest_token_of_the_full_forward():
    made = write(PROMPTS, 20)
    assert made.shape == (4, 20)
    assert made.dtype == np.int32
    for prompt, row in zip(PROMPTS, made, strict=True):
        assert_greedy(prompt, row)
    assert len(np.unique(made)) > 5, "not one token over and over"


@pytest.mark.parametrize(("length", "max_tokens"), [(60, 30), (250, 20)], ids=["out of a bucket", "out of a chunk"])
def test_longer_than_the_prompts_own_slots(length, max_tokens):
    """A prompt that fills its 64 slots, or a chunk of 256, but for a few: decoding goes on beyond them."""
    prompt = np.random.default_rng(0).integers(0, 32, length).tolist()
    assert_greedy(prompt, write([prompt], max_tokens)[0])


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_the_block_does_not_change_the_tokens(temperature):
    want = write(PROMPTS, 20, temperature=temperature, seed=5)
    for block in (1, 3):
        np.testing.assert_array_equal(write(PROMPTS, 20, block=block, temperature=temperature, seed=5), want)


def test_rows_of_a_ragged_batch_are_what_they_are_alone():
    batch = write(PROMPTS, 12)
    for prompt, row in zip(PROMPTS, batch, strict=True):
        np.testing.assert_array_equal(write([prompt], 12)[0], row)
    np.testing.assert_array_equal(write(PROMPTS[::-1], 12), batch[::-1])


def test_equal_seeds_give_equal_tokens_and_others_do_not():
    one, again, other = (write(PROMPTS, 16, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any(axis=1).all()
    # Rows draw independently: the same prompt three times is three texts.
    rows = write([PROMPTS[0]] * 3, 16, temperature=1.0)
    assert (rows[0] != rows[1]).any()
    assert (rows[1] != rows[2]).any()


def test_a_text_goes_on_as_it_would_have():
    """A draw depends on the place that it fills: five tokens made and given back lead to the same sixth."""
    made = write(PROMPTS[:1], 12, temperature=1.0, seed=3)[0].tolist()
    again = write([PROMPTS[0] + made[:5]], 7, temperature=1.0, seed=3)[0].tolist()
    assert made[5:] == again


@pytest.mark.parametrize("max_tokens", [1, 2, 8, 9, 10, 17])
def test_exactly_as_many_tokens_as_asked_for(max_tokens):
    want = write(PROMPTS[:1], 20)
    blocks = list(generator(8).stream(PROMPTS[:1], max_tokens))
    np.testing.assert_array_equal(np.concatenate(blocks, axis=1), want[:, :max_tokens])
    assert all(0 < block.shape[1] <= 8 for block in blocks)
    assert blocks[0].shape[1] == 1, "the first token is not kept waiting for a block"


def test_a_block_that_runs_over_the_last_slot_is_cut():
    """60 + 4 tokens are 64 slots exactly, and a block of eight would write four beyond them."""
    prompt = (PROMPTS[2] * 6)[:60]
    assert bucket(len(prompt) + 4) == len(prompt) + 4
    np.testing.assert_array_equal(write([prompt], 4, block=8), write([prompt], 4, block=1))
    assert_greedy(prompt, write([prompt], 4)[0])


def test_it_ends_when_every_row_has_stopped():
    made = write(PROMPTS, 24)
    assert len(set(made[0])) > 3
    stop = int(made[0, 5])
    when = int(np.flatnonzero(made[0] == stop)[0])
    blocks = np.concatenate(list(generator(1).stream(PROMPTS[:1], 24, stop_ids=[stop])), axis=1)
    np.testing.assert_array_equal(blocks[0], made[0, : when + 1])
    # A block is made as a whole: at most one more of them.
    longer = np.concatenate(list(generator(8).stream(PROMPTS[:1], 24, stop_ids=[stop])), axis=1)
    assert when < longer.shape[1] <= when + 8
    np.testing.assert_array_equal(longer[0], made[0, : longer.shape[1]])


def test_rows_stop_each_in_its_own_time():
    """Three tokens such that every row makes one of them, but not all rows at the same place."""
    made = write(PROMPTS, 24)
    for stops in itertools.combinations(np.unique(made).tolist(), 3):
        hits = np.isin(made, stops)
        last = int(hits.argmax(axis=1).max())
        if hits.any(axis=1).all() and last < 20 and not hits.all(axis=0).any():
            break
    else:
        pytest.fail("no such tokens: take another model")
    together = np.concatenate(list(generator(1).stream(PROMPTS, 24, stop_ids=stops)), axis=1)
    np.testing.assert_array_equal(together, made[:, : last + 1])


@pytest.mark.parametrize("on", ["tensor=2", "data=2,fsdp=2"])
def test_a_mesh_writes_the_same(on):
    spec = sharding.MeshSpec.parse(on)
    mesh = spec.build(jax.devices()[: spec.abstract().size])
    model = functional(CONFIG)
    alone = make(model, params(), vocab_size=30)
    abstract = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params(), sharding.shardings_of(abstract))
        stream = make(model, placed, vocab_size=30)
        for options in ({}, {"temperature": 1.0, "seed": 3}):
            got = np.concatenate(list(stream.stream(PROMPTS, 12, **options)), axis=1)
            want = np.concatenate(list(alone.stream(PROMPTS, 12, **options)), axis=1)
            np.testing.assert_array_equal(got, want)


def decode_memory(slots: int) -> Any:
    """Of a decode block of 4 over a cache of ``slots``, and the bytes of that cache."""
    model = functional(CONFIG)
    rows = jax.ShapeDtypeStruct((2,), jnp.int32)
    cache = jax.eval_shape(lambda: empty_cache(CONFIG, 2, slots))
    key, heat = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((), jnp.float32)
    run = jax.jit(functools.partial(decode, model, vocab_size=31), static_argnames="count", donate_argnames="cache")
    lowered = run.lower(model.abstract(), rows, rows, key, heat, cache, count=4)
    return lowered.compile().memory_analysis(), sum(leaf.size * 4 for leaf in jax.tree.leaves(cache))


def test_decoding_does_not_copy_the_cache():
    """32 times the slots: not a byte more of scratch than a chunk's, and the cache leaves where it came in."""
    (small, _), (large, cache_bytes) = decode_memory(256), decode_memory(8192)
    assert cache_bytes == 2 * 2 * 2 * 8192 * 2 * 8 * 4
    assert large.temp_size_in_bytes <= small.temp_size_in_bytes + 4096
    assert large.alias_size_in_bytes >= cache_bytes
    assert large.output_size_in_bytes - large.alias_size_in_bytes < 4096


def test_the_generator_donates_its_cache():
    stream = generator(8)
    token, cache = stream._prefill(params(), jnp.zeros((1, BUCKET), jnp.int32), jnp.zeros(1, jnp.int32),
                                   jax.random.key(0), jnp.float32(0), slots=BUCKET)  # fmt: skip
    stream._decode(params(), token, jnp.ones(1, jnp.int32), jax.random.key(0), jnp.float32(0), cache, count=8)
    assert cache.k.is_deleted()
    assert cache.v.is_deleted()


def test_prompts_of_similar_length_share_a_program():
    stream = make(functional(CONFIG), params(), block=2)
    for length in (1, 5, 30):
        list(stream.stream([[1] * length], 4))
    assert stream._prefill._cache_size() == stream._decode._cache_size() == 1
    assert [bucket(n) for n in (1, 64, 65, 129)] == [64, 64, 128, 256]


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([], {}, "a prompt is empty"),
        ([[1], []], {}, "a prompt is empty"),
        ([[1, 32]], {}, "token 32, but the vocabulary has 32 tokens"),
        ([[1, 2], [-3, 31]], {}, "token -3, but the vocabulary has 32 tokens"),
        ([[1]], {"temperature": -0.5}, "temperature = -0.5"),
        ([[1]], {"temperature": float("nan")}, "temperature = nan"),
        ([[1]], {"max_tokens": 0}, "max_tokens = 0"),
        ([[1]], {"stop_ids": [32]}, "stop_ids.* 32"),
    ],
)
def test_what_cannot_be_generated_from_is_refused(prompts, options, words):
    with pytest.raises(ValueError, match=words):
        next(generator().stream(prompts, options.pop("max_tokens", 4), **options))


def test_tokens_that_the_tokenizer_lacks_are_never_made():
    """Embeddings are padded to round numbers; the rows beyond the tokenizer's vocabulary stand for nothing."""
    few = make(functional(CONFIG), params(), block=4, vocab_size=7)
    for temperature in (0.0, 5.0):
        made = np.concatenate(list(few.stream([[1], [6]], 24, temperature=temperature)), axis=1)
        assert made.max() < 7
    assert set(made.flatten()) == set(range(7)), "and all the others are"
    with pytest.raises(ValueError, match="token 7, but the vocabulary has 7 tokens"):
        next(few.stream([[7]], 4))
    for wrong in (0, 33):
        with pytest.raises(ValueError, match=f"vocab_size = {wrong}"):
            Generator(functional(CONFIG), params(), vocab_size=wrong)


def test_a_block_of_nothing_is_refused():
    with pytest.raises(ValueError, match="block = 0"):
        Generator(functional(CONFIG), params(), block=0)


# The cache


def test_a_cache_holds_what_the_configuration_says():
    cache = empty_cache(CONFIG, 3, 10)
    assert cache.k.shape == cache.v.shape == (2, 3, 10, 2, 8)
    assert cache.k.dtype == jnp.float32
    assert not np.asarray(cache.k).any()


def test_a_cache_on_a_mesh_is_sharded_and_repeats_few_kv_heads():
    config = tiny.decoder(dtype="bfloat16", heads=4, kv_heads=2, layers=1)
    spec = sharding.MeshSpec.parse("data=2,tensor=4")
    with jax.set_mesh(spec.build()):
        cache = jax.jit(lambda: empty_cache(config, 4, 6))()
    assert cache.k.shape == (1, 4, 6, 4, 8), "each of four shards holds the head that its queries need"
    assert cache.k.dtype == jnp.bfloat16
    assert cache.k.sharding.spec == jax.P(None, "data", None, "tensor", None)


def test_layers_of_different_heads_do_not_fit_one_cache():
    blocks = tuple(BlockConfig(AttentionConfig(4, kv, 8), MlpConfig(8)) for kv in (4, 2))
    with pytest.raises(NotImplementedError, match=r"one \(kv_heads, head_dim\).*\[\(2, 8\), \(4, 8\)\]"):
        empty_cache(DecoderConfig(layers=2, pattern=blocks), 1, 8)


def test_stale_slots_of_a_reused_cache_do_not_show(rng):
    """A cache that held another text, nan included, gives the tokens of a fresh one."""
    model = functional(CONFIG)
    tokens = jnp.asarray(rng.integers(0, 32, (2, 4)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (2, 4))
    run = quick.jit(lambda params, cache: model.forward(params, tokens, positions, cache)[0])
    fresh = empty_cache(CONFIG, 2, 12)
    used = DenseCache(jnp.full_like(fresh.k, jnp.nan), jnp.full_like(fresh.v, jnp.inf))
    np.testing.assert_array_equal(run(params(), used), run(params(), fresh))
