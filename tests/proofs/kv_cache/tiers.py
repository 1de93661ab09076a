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
from tests.infer import engines
from tests.proofs.harness import proof

SIZES = dataclasses.replace(engines.ENGINES["tight, recompute"], max_sequences=3)


@functools.cache
def cold() -> Engine:
    """An engine without a prefix cache."""
    return engines.build(dataclasses.replace(SIZES, prefix_cache=False), "llama", "float64")


@proof("kv_cache", count=1000, sample=1, float64=True, counts=("host_hits", "disk_hits", "damaged", "dropped"))
def tiers_in_random_histories(seed: int) -> dict[str, float]:
    """Admission, preemption, eviction, restarts, damaged and missing files, a full disk: equal tokens, no page lost."""
    rng = np.random.default_rng(seed)
    folder = Path(tempfile.mkdtemp(prefix="tiers-"))
    counts: dict[str, float] = dict.fromkeys(("host_hits", "disk_hits", "damaged", "dropped"), 0.0)
    try:
        sizes = with_kv_cache(SIZES, kv_host=float(rng.choice([0.0, 2e-5, 1e-3])), kv_disk=folder)
        sizes = dataclasses.replace(sizes, kv_disk_gib=float(rng.choice([2e-5, 1.0])))
        for _ in range(int(rng.integers(1, 3))):
            engine = engines.build(sizes, "llama", "float64")
            store = engine.page_store
            assert store is not None
            for file in [f for f in store.folder.iterdir() if rng.random() < 0.1] if store.folder is not None else ():
                body = file.read_bytes()
                place = int(rng.integers(len(body)))
                file.write_bytes(body[:place] + bytes([body[place] ^ 255]) + body[place + 1 :])
            asked = engines.traffic(rng, sizes, 8)
            made, want = engines.serve(engine, asked), engines.serve(cold(), asked)
            for one, two in zip(made, want, strict=True):
                if "cancelled" not in {s.finish for s in (*one.sequences, *two.sequences)}:
                    assert [s.tokens for s in one.sequences] == [s.tokens for s in two.sequences]
            engine.close()
            for name in counts:
                counts[name] += getattr(store.counts, name)
            files = list(store.folder.iterdir()) if store.folder is not None else []
            assert len(files) == store.report()["disk_pages"]
            assert sum(f.stat().st_size for f in files) == store.report()["disk_bytes"] <= sizes.kv_disk_gib * 2**30
    finally:
        shutil.rmtree(folder)
    return counts
