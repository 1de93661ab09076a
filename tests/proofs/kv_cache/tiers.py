"""Tiers of the KV cache: random histories of requests, restarts and damage give a cold engine's tokens."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np

from jaxllm.infer import Engine
from jaxllm.infer.kv_cache_options import with_kv_cache
from jaxllm.infer.page_store import PageStore
from jaxllm.infer.scheduling.scheduler import Scheduler
from tests.infer import engines
from tests.proofs.harness import proof

SIZES = dataclasses.replace(engines.ENGINES["tight, recompute"], max_sequences=3)
GIB = 2**30


@functools.cache
def cold() -> Engine:
    """An engine without a prefix cache."""
    return engines.build(dataclasses.replace(SIZES, prefix_cache=False), "llama", "float64")


@functools.cache
def tiered() -> Engine:
    """An engine whose page store is replaced by others."""
    return engines.build(with_kv_cache(SIZES, kv_disk=Path(tempfile.gettempdir()) / "unused-pages"), "llama", "float64")


def restarted(store: PageStore) -> Engine:
    """The engine as it starts: nothing is cached on the device, and its tiers are this store."""
    engine = tiered()
    scheduler = engine.scheduler
    assert isinstance(scheduler, Scheduler)
    assert scheduler.idle
    scheduler.restart()
    scheduler._prefix_cache = dataclasses.replace(scheduler._prefix_cache, store=store, restores={}, spills=[])
    engine.page_tiers.store = store
    return engine


@proof("kv_cache", count=1000, sample=1, float64=True, counts=("host_hits", "disk_hits", "damaged", "dropped"))
def tiers_in_random_histories(seed: int) -> dict[str, float]:
    """Admission, preemption, eviction, restarts, damaged and missing files, a full disk: equal tokens, no page lost."""
    rng = np.random.default_rng(seed)
    folder = Path(tempfile.mkdtemp(prefix="tiers-"))
    counts: dict[str, float] = dict.fromkeys(("host_hits", "disk_hits", "damaged", "dropped"), 0.0)
    host, disk = int(rng.choice([0, 20_000, GIB])), int(rng.choice([20_000, GIB]))
    asked = engines.traffic(rng, SIZES, 8)
    want = engines.serve(cold(), asked)
    try:
        for _ in range(int(rng.integers(2, 4))):
            store = PageStore(host, folder, disk)
            assert store.folder is not None
            for file in [f for f in store.folder.iterdir() if rng.random() < 0.1]:
                body = file.read_bytes()
                place = int(rng.integers(len(body)))
                file.write_bytes(body[:place] + bytes([body[place] ^ 255]) + body[place + 1 :])
            engine = restarted(store)
            made = engines.serve(engine, asked)
            for one, two in zip(made, want, strict=True):
                if "cancelled" not in {s.finish for s in (*one.sequences, *two.sequences)}:
                    assert [s.tokens for s in one.sequences] == [s.tokens for s in two.sequences]
            engine.keep_pages()
            for name in counts:
                counts[name] += getattr(store.counts, name)
            files = list(store.folder.iterdir())
            assert len(files) == store.report()["disk_pages"]
            assert sum(f.stat().st_size for f in files) == store.report()["disk_bytes"] <= disk
    finally:
        shutil.rmtree(folder)
    return counts
