"""Page tiers: pages of the KV cache that leave the device for host memory and files, and come back.

Two kinds leave it: those of preempted sequences (swap, arXiv:2309.06180, section 4.5), and those that the prefix cache
evicts, which the page store keeps by their hash.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np

from jaxllm.config import ConfigError
from jaxllm.files import digest
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.page_store import PageStore, weights_digest
from jaxllm.infer.runner.multihost import MultihostRunner
from jaxllm.infer.runner.runner_protocol import Runner
from jaxllm.infer.scheduling.prefix_cache import PrefixCache
from jaxllm.infer.scheduling.step_plan import StepPlan
from pallas_kernels.paged_attention import Slots


class PageTiers:
    """Copies pages between a runner's device and the tiers behind it, as plans say.

    Args:
        runner: has the pages on the device.
        config: sizes of the tiers.

    Raises:
        ValueError: tiers of a runner of several processes.

    Attributes:
        store: tiers of the prefix cache; None: there are none.
    """

    def __init__(self, runner: Runner, config: EngineConfig):
        self.runner, self.config = runner, config
        self.store: PageStore | None = None
        if not config.has_tiers:
            return
        if isinstance(runner, MultihostRunner):
            raise ConfigError("engine: kv_host_gib and kv_disk are for the devices of one process; leave them out.")
        disk = None if config.kv_disk is None else Path(config.kv_disk)
        host_bytes, disk_bytes = (int(gib * 2**30) for gib in (config.kv_host_gib, config.kv_disk_gib))
        self.store = PageStore(host_bytes, disk, disk_bytes, self._identity())

    def transfer(self, replica: int, plan: StepPlan) -> None:
        """Copies what a plan says before its step: evicted pages, restored ones, those of preempted sequences."""
        runner = self.runner
        self._spill(replica, plan.spills)
        for group in {group for group, _, _ in plan.restores}:
            some = [(page, content) for g, page, content in plan.restores if g == group]
            contents = (np.concatenate(x, axis=1) for x in zip(*(c.values() for _, c in some), strict=True))
            held = Slots(**dict(zip(some[0][1], contents, strict=True)))
            runner.write(replica, group, [page for page, _ in some], held)
        for sequence, held in plan.swap_out:
            sequence.swapped = [
                (columns, runner.read(replica, group, pages))
                for group, (columns, pages) in zip(runner.spec.tables, held, strict=True)
            ]
        for sequence, held in plan.swap_in:
            assert sequence.swapped is not None
            for group, (_, pages), (_, content) in zip(runner.spec.tables, held, sequence.swapped, strict=True):
                runner.write(replica, group, pages, content)
            sequence.swapped = None

    def keep(self, prefix_caches: Iterable[PrefixCache]) -> None:
        """Writes the prefix caches of all replicas, and the pages in host memory, to the disk tier, if there is one."""
        if self.store is None or self.config.kv_disk is None:
            return
        for replica, prefix_cache in enumerate(prefix_caches):
            # Pages that are yet to be copied from the store are in it, and not read here.
            self._spill(replica, prefix_cache.registered())
        self.store.flush()

    def restart(self) -> None:
        """Forgets the pages of weights that have been replaced."""
        if self.store is not None:
            self.store.restart(self._identity())

    def _spill(self, replica: int, spills: list[tuple[int, int, bytes]]) -> None:
        """Copies pages of a replica from the device to the page store: (layer group, page, hash)."""
        if (store := self.store) is None:
            return
        for group in {group for group, _, _ in spills}:
            some = [(page, name) for g, page, name in spills if g == group and (name, group) not in store]
            found = self.runner.read(replica, group, [page for page, _ in some]) if some else Slots(None)
            for place, (_, name) in enumerate(some):
                arrays = {n: x[:, place : place + 1].copy() for n, x in found._asdict().items() if x is not None}
                store.put((name, group), arrays)

    def _identity(self) -> str:
        """Digest of what pages on a disk depend on besides tokens and salts: model, weights, sizes of pages."""
        if self.config.kv_disk is None:
            return ""
        spec, model = self.runner.spec, self.runner.model
        shapes = [[str(x.dtype), x.shape[0], *x.shape[2:]] for x in jax.tree.leaves(self.runner.pools)]
        architecture = [] if model is None else [str(model.config)]
        return digest([*architecture, weights_digest(jax.tree.leaves(self.runner.params)), spec.page_size, shapes])[:32]
