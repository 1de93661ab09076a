"""Salts of the prefix cache: what changes a sequence's keys and values keeps its pages apart from others'."""

from __future__ import annotations

import dataclasses
import itertools

import hypothesis
import numpy as np
from hypothesis import strategies as st

from jaxllm.infer import EngineConfig, SamplingParams
from jaxllm.infer.scheduling.page_allocator import PageAllocator
from jaxllm.infer.scheduling.prefix_cache import PrefixCache, prefix_salt
from jaxllm.infer.scheduling.sequence import Request, Sequence
from tests.infer import engines

CONFIG = EngineConfig(page_size=4)
FIELDS = ("client", "adapter", "inputs")
texts = st.text(max_size=3) | st.text(min_size=64, max_size=70)


def sequence(salt: bytes, tokens: list[int]) -> Sequence:
    made = Sequence(Request(0, tokens, SamplingParams(), salt, 0, frozenset()), 0, 0, list(tokens), pages=[[]])
    made.request.sequences.append(made)
    return made


@hypothesis.given(st.lists(st.fixed_dictionaries(dict.fromkeys(FIELDS, texts)), min_size=2, max_size=4))
def test_pages_are_shared_by_equal_salts_alone(asked):
    """Of the same tokens under several salts: a sequence finds the pages of its own salt, and no others."""
    tokens = list(range(13))
    pages = [PageAllocator(40)]
    cache = PrefixCache(CONFIG, [None], pages, 4)
    for number, fields in enumerate(asked):
        one = sequence(prefix_salt(CONFIG, **fields), tokens)
        assert cache.reuse(one) == 12 * (fields in asked[:number])
        one.pages[0] += [pages[0].allocate() for _ in range(3 - len(one.pages[0]))]
        one.computed = 12
        cache.register(one)


def test_each_part_changes_the_salt():
    """Equal characters in another field, another KV format or another retention rule give another salt."""
    made = [prefix_salt(CONFIG), *(prefix_salt(CONFIG, **{name: "a"}) for name in FIELDS)]
    made += [prefix_salt(CONFIG, **dict.fromkeys(pair, "a")) for pair in itertools.combinations(FIELDS, 2)]
    made += [prefix_salt(dataclasses.replace(CONFIG, kv_dtype=kv)) for kv in ("bfloat16", "int8", "fp8")]
    made.append(prefix_salt(dataclasses.replace(CONFIG, retention="a", prefix_cache=False)))
    assert len(set(made)) == len(made)
    assert prefix_salt(CONFIG, client="a") == prefix_salt(dataclasses.replace(CONFIG, max_sequences=3), client="a")


def test_long_salts_of_clients_differ_to_their_end(rng: np.random.Generator):
    """Two salts with the same first 64 bytes."""
    engine, prompt = engines.engine("roomy"), rng.integers(0, engines.VOCAB, 30).tolist()
    params = SamplingParams(max_tokens=2, temperature=0.0)
    hits = []
    for salt in ("x" * 70 + "a", "x" * 70 + "b", "x" * 70 + "a"):
        before = engine.scheduler.hit_tokens
        engines.serve(engine, [{"prompt": prompt, "params": params, "salt": salt}])
        hits.append(engine.scheduler.hit_tokens - before)
    assert hits == [0, 0, 24]
