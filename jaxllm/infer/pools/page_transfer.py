"""Page transfer: KV cache pages of a sequence on their way from a prefill engine to a decode engine.

The prefill engine's devices read them behind the step that fills them. In one process ``jax.device_put`` copies them to
the decode engine's devices; to a decode engine in another process the host sends them (``remote_engine``). Once they
have arrived, the decode engine's next step begins with them. The engine's thread waits for none of it, and neither does
a step of either pool (Splitwise, arXiv:2311.18677). A decode engine fetches pages when it has room for them, so
the prefill engine's pages are the queue between both, as in DistServe (arXiv:2401.09670, section 4.3).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxllm.infer.engine.engine_metrics import EngineMetrics
from jaxllm.infer.pools.decode_engine import PageArrival
from jaxllm.infer.pools.pooled_runner import PooledRunner


@dataclass(eq=False)
class PageTransfer:
    """Pages of a sequence between two engines.

    Attributes:
        parts: some pages each.
    """

    parts: list[PageArrival] = field(default_factory=list)

    @property
    def has_arrived(self) -> bool:
        """Whether all contents are on the decode engine's devices."""
        return all(one.has_arrived for one in self.parts)

    def land(self) -> None:
        """Writes the contents into the decode engine's pages, behind the steps that were started and before others."""
        for one in self.parts:
            one.land()
        self.parts.clear()

    def drop(self) -> None:
        """Drops the contents: the sequence has ended."""
        for one in self.parts:
            one.drop()
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
        one, other = self.runner.prefill[giver], self.runner.decode[taker - len(self.runner.prefill)]
        transfer = PageTransfer()
        for group, pairs in enumerate(moves):
            targets = iter([target for _, target in pairs])
            for some, parts in one.give(group, [page for page, _ in pairs]):
                arrival = other.receive(group, [next(targets) for _ in some], parts)
                transfer.parts.append(arrival)
                self.metrics.moved_pages += len(some)
                self.metrics.moved_bytes += arrival.nbytes
        return transfer
