"""Batch slots: the part of an engine's capacity that batches may use, so that other requests come first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from jaxllm.serve.api.route_support import RequestService

_POLL_SECONDS = 0.02


class BatchSlots:
    """Slots for the lines of batches: three quarters of the engine's sequences, less those that other requests use.

    One line may always run, so that batches go on beside a steady load.

    Args:
        service: state of the server.
        share: part of the engine's sequences that batches may use; 1 where nothing else uses the engine.
        ahead: lines beyond those that the engine is given, for a policy that chooses among those that wait.
    """

    def __init__(self, service: RequestService, share: float = 0.75, ahead: int = 0):
        self._service, self._share, self._ahead, self._used = service, share, ahead, 0

    @property
    def most(self) -> int:
        """Sequences that batches may have in the engine at a time."""
        return max(1, int(self._service.ready().backend.max_sequences * self._share)) + self._ahead

    @contextlib.asynccontextmanager
    async def taken(self, sequences: int) -> AsyncIterator[None]:
        """Context manager that waits for slots and holds them."""
        while self._used and self._used + sequences > min(self.most, self.most_beside_others):
            await asyncio.sleep(_POLL_SECONDS)
        self._used += sequences
        try:
            yield
        finally:
            self._used -= sequences

    @property
    def most_beside_others(self) -> int:
        """Sequences of the engine that no other request uses or waits for."""
        dispatcher = self._service.ready()
        others = max(0, dispatcher.open - self._used)
        return dispatcher.backend.max_sequences + self._ahead - others
