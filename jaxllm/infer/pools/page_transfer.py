"""Page transfer: KV cache pages of a sequence on their way from a prefill engine to a decode engine.

The prefill engine's devices read them behind the step that fills them, ``jax.device_put`` copies them to the decode
engine's devices, and once they have arrived its next step begins with them. The host waits for none of it, and neither
does a step of either pool (Splitwise, arXiv:2311.18677). A decode engine fetches pages when it has room for them, so
the prefill engine's pages are the queue between both, as in DistServe (arXiv:2401.09670, section 4.3).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from jaxllm.infer.engine.engine_metrics import EngineMetrics
from jaxllm.infer.pools.phase_runner import PhaseRunner
from jaxllm.infer.pools.pooled_runner import PooledRunner
from pallas_kernels.paged_attention import Slots


@dataclass(eq=False)
class PageTransfer:
    """Pages of a sequence between two engines.

    Attributes:
        taker: runner of the decode engine.
        parts: (layer group, pages of the decode engine, their contents on its devices).
    """

    taker: PhaseRunner
    parts: list[tuple[int, list[int], Slots]] = field(default_factory=list)

    @property
    def has_arrived(self) -> bool:
        """Whether all contents are on the decode engine's devices."""
        return all(x.is_ready() for _, _, held in self.parts for x in jax.tree.leaves(held))

    def land(self) -> None:
        """Writes the contents into the decode engine's pages, behind the steps that were started and before others."""
        for group, pages, held in self.parts:
            self.taker.take(group, pages, held)
        self.parts.clear()


class PageTransfers:
    """Starts page transfers, and counts them.

    Args:
        runner: runner of both pools.
        metrics: counts pages and bytes.
    """

    def __init__(self, runner: PooledRunner, metrics: EngineMetrics):
        self.runner, self.metrics = runner, metrics

    def start(self, giver: int, taker: int, moves: list[list[tuple[int, int]]]) -> PageTransfer:
        """Starts a transfer; the giver's pages may be used by others from its next step on.

        Args:
            giver, taker: numbers of the engines.
            moves: per layer group: (page of the giver, page of the taker).
        """
        one, other = self.runner.engines[giver], self.runner.engines[taker]
        transfer = PageTransfer(other)
        for group, pairs in enumerate(moves):
            targets = iter([target for _, target in pairs])
            for some, parts in one.give(group, [page for page, _ in pairs]):
                held = other.assembled(parts)
                transfer.parts.append((group, [next(targets) for _ in some], held))
                self.metrics.moved_pages += len(some)
                self.metrics.moved_bytes += sum(x.nbytes for x in jax.tree.leaves(held))
        return transfer
