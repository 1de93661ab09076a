"""Working sets: slots and pages of adapters leak nothing; thousands of names share a few slots."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.infer import AdapterCatalogue, SamplingParams
from jaxllm.infer.adapter_catalogue import AdapterRevision
from jaxllm.infer.runner.adapter_pool import PackedAdapter
from jaxllm.infer.scheduling.adapter_slots import HOST_ADAPTERS_PER_SLOT, AdapterSlots
from jaxllm.peft import Adapter
from tests.infer import adapters, engines
from tests.proofs.engine.programs import Compilations
from tests.proofs.harness import proof

OPERATIONS = 10_000
NAMES, SLOTS = 5_000, 32


@proof("adapters_served", count=10, sample=1)
def random_operations_leak_nothing(seed: int) -> None:
    """10,000 random pins, unpins, requests ahead, new revisions and removals over too few slots and pages.

    Every slot's pages hold that adapter's content whenever it is in use, every page is free or in one table, an adapter
    in use is never evicted, and in the end all can be evicted.
    """
    rng = np.random.default_rng(seed)
    columns, slots_count = int(rng.integers(1, 6)), int(rng.integers(1, 7))
    pages = int(rng.integers(columns, columns * slots_count + 1))
    held: dict[int, tuple[int, int]] = {}

    def load(revision: AdapterRevision) -> PackedAdapter:
        many = revision.id % columns + 1
        return PackedAdapter(tuple((np.array([revision.id, i]),) for i in range(many)), float(revision.id))

    def write(page: int, content: tuple[np.ndarray, ...]) -> None:
        held[page] = tuple(content[0].tolist())

    catalogue, slots = AdapterCatalogue(), AdapterSlots(slots_count, columns, pages, load, write)
    users: Counter[AdapterRevision] = Counter()
    names = [f"a{n}" for n in range(4 * slots_count)]
    for name in names:
        catalogue.add(name, Path(name))
    for step in range(OPERATIONS):
        what, name = rng.integers(10), names[rng.integers(len(names))]
        revision = catalogue.find(name)
        if what < 4:
            users[revision] += slots.pin(revision)
        elif what < 8:
            if used := [one for one, n in users.items() if n]:
                one = used[rng.integers(len(used))]
                slots.unpin(one)
                users[one] -= 1
        elif what == 8:
            slots.prepare([catalogue.find(names[n]) for n in rng.integers(len(names), size=3)])
            if rng.random() < 0.1:
                slots.wait(1)
            slots.collect()
        elif rng.random() < 0.5:
            slots.keep(catalogue.add(name, Path(name)), load(catalogue.find(name)))
        else:
            for one in catalogue.remove(name):
                slots.drop(one)
            catalogue.add(name, Path(name))
        _check(slots, pages, held, users, full=step % 50 == 0)
    for one, many in users.items():
        for _ in range(many):
            slots.unpin(one)
    _check(slots, pages, held, Counter(), full=True)
    assert slots.loads - slots.evictions == slots.resident
    assert slots.evictions > OPERATIONS / 50


def _check(slots: AdapterSlots, pages: int, held: dict[int, Any], users: Counter[AdapterRevision], full: bool) -> None:
    taken = [page for one in slots._resident.values() for page in one.pages]
    assert len(taken) + len(slots._free_pages) == pages
    assert len(slots._resident) + len(slots._free_slots) == len(slots.scales)
    assert slots.on_host <= HOST_ADAPTERS_PER_SLOT * len(slots.scales)
    for revision, many in users.items():
        if many:
            slot = slots.slot(revision)
            own = [int(page) for page in slots.tables[slot] if page >= 0]
            assert [held[page] for page in own] == [(revision.id, i) for i in range(len(own))]
            assert len(own) == revision.id % slots.tables.shape[1] + 1
            assert slots.scales[slot] == revision.id
            assert slots._resident[revision.id].users == many
    if full:
        assert sorted([*taken, *slots._free_pages]) == list(range(pages))
        used = sorted(one.slot for one in slots._resident.values())
        assert sorted([*used, *slots._free_slots]) == list(range(len(slots.scales)))
        assert all((slots.tables[slot] == -1).all() for slot in slots._free_slots)


@proof("adapters_served", count=3, sample=1)
def thousands_share_a_few_slots(seed: int) -> None:
    """5,000 names, 32 slots, 400 requests of a heavy-tailed mix: nothing is compiled, cold loads are counted.

    An adapter is read when it is first needed, and not before; the catalogue itself reads nothing.
    """
    rng, reads = np.random.default_rng(seed), Counter[int]()

    def read(folder: Path) -> Adapter:
        number = int(folder.name)
        reads[number] += 1
        return adapters.drawn("llama", number % 40, 4 + number % 13)

    config = adapters.sized(adapter_slots=SLOTS, adapter_rank=16, max_sequences=8)
    engine, heard = engines.build(config, "llama", adapters=AdapterCatalogue(read)), Compilations()
    for n in range(NAMES):
        engine.adapters.add(f"a{n}", Path(str(n)))
    numbers = np.minimum(rng.zipf(1.3, 400) - 1, NAMES - 1)
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=0, ignore_eos=True)
    prompt = rng.integers(0, engines.VOCAB, 6).tolist()
    with heard:
        requests = [engine.submit([*prompt, i % engines.VOCAB], params, adapter=f"a{n}") for i, n in enumerate(numbers)]
        while engine.busy:
            engine.step()
            adapters.check_slots(engine)
    slots, used = engine.adapter_slots, {*numbers.tolist()}
    assert slots is not None
    assert len(used) > 2 * SLOTS
    assert all(request.sequences[0].finish == "length" for request in requests)
    assert {*reads} == used
    assert slots.reads == sum(reads.values())
    assert len(used) <= slots.loads == slots.evictions + slots.resident
    assert heard.names == []
    assert engine.runner.program_cache.counts.late == 0  # type: ignore[union-attr]
    for request, n in list(zip(requests, numbers.tolist(), strict=True))[:: 400 // 20]:
        merged = adapters.merged("llama", "float32", n % 40, 4 + n % 13)
        assert engines.error("llama", "float32", [request], merged) < 1e-3
