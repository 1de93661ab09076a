"""Tiers of the KV cache: host memory and a disk behind the device, found by hash, after a restart too."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.infer import Engine, EngineConfig, SamplingParams
from jaxllm.infer.kv_cache_options import with_kv_cache
from jaxllm.infer.page_store import PageStore
from tests.infer import engines


def page(number: int) -> dict[str, np.ndarray]:
    return {"data": np.full((2, 1, 3, 4), number, np.int8), "scales": np.full((2, 1, 1), number, np.float32)}


BYTES = 24 + 8
"""Bytes of a page."""


def key(number: int) -> tuple[bytes, int]:
    return bytes([number] * 16), number % 2


def test_least_recently_used_pages_go_to_the_disk_and_are_found_after_a_restart(tmp_path):
    store = PageStore(3 * BYTES, tmp_path, identity="one")
    for number in range(5):
        store.put(key(number), page(number))
        store.get(key(0))
    assert (store.report()["host_pages"], store.report()["disk_pages"]) == (3, 2)
    assert all(key(number) in store for number in range(5))
    store.flush()
    again = PageStore(3 * BYTES, tmp_path, identity="one")
    for number in range(5):
        found = again.get(key(number))
        assert found is not None
        for name, x in page(number).items():
            np.testing.assert_array_equal(found[name], x)
            assert found[name].dtype == x.dtype
    assert again.counts.disk_hits == 5
    assert key(0) not in PageStore(3 * BYTES, tmp_path, identity="other weights")


def test_without_a_disk_pages_are_dropped():
    store = PageStore(2 * BYTES)
    for number in range(5):
        store.put(key(number), page(number))
    assert [key(number) in store for number in range(5)] == [False, False, False, True, True]
    assert store.counts.dropped == 3


def test_a_full_disk_drops_the_least_recently_used(tmp_path):
    store = PageStore(0, tmp_path, 700)
    for number in range(9):
        store.put(key(number), page(number))
    report = store.report()
    assert 0 < report["disk_pages"] < 9
    assert report["disk_bytes"] <= 700
    assert sum(file.stat().st_size for file in Path(store.folder).iterdir()) == report["disk_bytes"]  # pyright: ignore[reportArgumentType]
    assert key(8) in store


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone"])
def test_a_damaged_page_is_dropped_and_named(damage, tmp_path, caplog):
    store = PageStore(0, tmp_path)
    store.put(key(1), page(1))
    (file,) = Path(store.folder).iterdir()  # pyright: ignore[reportArgumentType]
    body = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        flipped = body[:-1] + bytes([body[-1] ^ 1])
        file.write_bytes({"flip": flipped, "cut": body[: len(body) // 2], "empty": b""}[damage])
    with caplog.at_level(logging.WARNING, "jaxllm.infer"):
        assert store.get(key(1)) is None
    assert file.name in caplog.text
    assert store.counts.damaged == 1
    assert key(1) not in store
    assert not file.exists()


def requests(rng: np.random.Generator, many: int) -> list[dict[str, Any]]:
    """Prompts of three documents and a question each, greedy."""
    documents = rng.integers(0, engines.VOCAB, (3, 36)).tolist()
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0)
    return [
        {"prompt": [*documents[i % 3], *rng.integers(0, engines.VOCAB, 3).tolist()], "params": params, "at": 3 * i}
        for i in range(many)
    ]


def tokens(engine: Engine, asked: list[dict[str, Any]]) -> list[list[int]]:
    return [r.sequences[0].tokens for r in engines.serve(engine, asked)]


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("kv", ["auto", "int4"])
def test_evicted_prefixes_come_back(kv, rng, tmp_path, float64):
    """A pool that holds one document serves three in turn from the host, and after a restart from the disk."""
    sizes = dataclasses.replace(engines.ENGINES["tight, recompute"], kv_dtype=kv, max_sequences=2)
    asked = requests(rng, 8)
    want = tokens(engines.build(dataclasses.replace(sizes, prefix_cache=False), "llama", "float64"), asked)
    tiers = with_kv_cache(sizes, kv, kv_host=1e-3, kv_disk=tmp_path)
    first = engines.build(tiers, "llama", "float64")
    assert tokens(first, asked) == want
    assert first.page_tiers.store is not None
    assert first.page_tiers.store.counts.host_hits > 8
    first.close()
    second = engines.build(tiers, "llama", "float64")
    assert second.page_tiers.store is not None
    file = sorted(Path(second.page_tiers.store.folder).iterdir())[0]  # pyright: ignore[reportArgumentType]
    file.write_bytes(file.read_bytes()[:-1])
    assert tokens(second, asked) == want
    assert second.page_tiers.store.counts.disk_hits > 8
    assert second.page_tiers.store.counts.damaged <= 1
    other = engines.params_of("llama", "float64", seed=5)
    second.swap(other)
    cold = engines.build(sizes, "llama", "float64")
    cold.swap(other)
    assert tokens(second, asked) == tokens(cold, asked)


def test_what_tiers_do_not_go_with():
    with pytest.raises(ValueError, match="keep pages of the prefix cache, and prefix_cache = False"):
        with_kv_cache(EngineConfig(), "auto", "window+sinks", 1.0)
    with pytest.raises(ValueError, match="kv_host_gib = -1"):
        EngineConfig(kv_host_gib=-1.0)
