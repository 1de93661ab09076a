"""Adapters of an engine: a catalogue of those that requests may name, and slots for those that are on the device."""

from __future__ import annotations

from collections.abc import Mapping

from jaxllm.infer.adapter_catalogue import AdapterCatalogue, AdapterRevision, Source
from jaxllm.infer.runner.adapter_pool import PackedAdapter
from jaxllm.infer.runner.runner_protocol import Runner
from jaxllm.infer.scheduling.adapter_slots import AdapterSlots
from jaxllm.peft.adapter import AdapterError


class ServedAdapters:
    """Adapters of an engine; ``load``, ``unload`` and ``rollback`` may be called from any thread.

    Args:
        catalogue: adapters by name, with their revisions.
        runner: runs the steps, with an adapter pool if the engine serves adapters.

    Attributes:
        slots: slots of the pool; None: the engine serves no adapters.
    """

    def __init__(self, catalogue: AdapterCatalogue, runner: Runner):
        self.catalogue, self._runner = catalogue, runner
        self.slots: AdapterSlots | None = None
        if (pool := runner.adapter_pool) is not None:
            self.slots = AdapterSlots(
                pool.slots,
                pool.columns,
                pool.pages,
                lambda revision: self._packed(revision.source),
                runner.write_adapter,
            )

    def load(self, adapters: Mapping[str, Source]) -> list[AdapterRevision]:
        """Adds a revision of each adapter; of none, if one is not an adapter of this model."""
        slots, packed = self._check(), {name: self._packed(source) for name, source in adapters.items()}
        revisions = []
        for name, source in adapters.items():
            revisions.append(self.catalogue.add(name, source))
            slots.keep(revisions[-1], packed[name])
        return revisions

    def unload(self, name: str) -> None:
        """Removes an adapter."""
        for revision in self.catalogue.remove(name):
            self._check().drop(revision)

    def rollback(self, name: str) -> AdapterRevision:
        """Goes back to the revision before the newest one."""
        self._check()
        return self.catalogue.rollback(name)

    def newest(self, name: str) -> AdapterRevision:
        """Newest revision of an adapter, for a request.

        Raises:
            AdapterNotFoundError: there is no such adapter.
            AdapterError: it could not be read.
        """
        self._check()
        revision = self.catalogue.find(name)
        if (failure := self.failure(revision)) is not None:
            raise failure
        return revision

    def failure(self, revision: AdapterRevision | None) -> AdapterError | None:
        """Why an adapter could not be read; None: it was, or was not tried yet, or there is none."""
        if revision is None or self.slots is None or (why := self.slots.failure(revision)) is None:
            return None
        return AdapterError(f"the adapter {revision.name!r} cannot be loaded: {why}")

    def collect(self) -> bool:
        """Takes over the adapters that have been read; False if the engine serves none."""
        if self.slots is not None:
            self.slots.collect()
        return self.slots is not None

    def wait(self, seconds: float) -> bool:
        """Waits for an adapter that is being read; False if none is."""
        return self.slots is not None and self.slots.wait(seconds)

    def _packed(self, source: Source) -> PackedAdapter:
        assert self._runner.adapter_pool is not None
        return self._runner.adapter_pool.pack(self.catalogue.read(source))

    def _check(self) -> AdapterSlots:
        if self.slots is None:
            raise ValueError("this engine serves no adapters: build it with adapter_slots (--adapter-slots).")
        return self.slots
