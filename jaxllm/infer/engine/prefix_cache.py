"""Beginnings that several requests share: pages whose tokens are known are let be found, and are found again."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.infer.engine.page_allocator import NONE, Pages
from jaxllm.infer.engine.sequence import Sequence
from jaxllm.infer.engine_config import EngineConfig


@dataclass(frozen=True)
class Prefixes:
    """Finding and registering pages of a scheduler.

    Attributes:
        config: of the engine.
        windows: of each group of layers: its sliding window, or None.
        pages: of each group's pool.
        page_size: positions of a page.
    """

    config: EngineConfig
    windows: list[int | None]
    pages: list[Pages]
    page_size: int

    def register(self, sequence: Sequence) -> None:
        """Lets others find the pages of this sequence whose tokens are known."""
        if not self.config.prefix_cache:
            return
        known = min(sequence.computed, len(sequence.tokens))
        if (piece := self.config.piece) is not None:  # only what was computed as anybody else would compute it
            known = min(known, len(sequence.request.prompt)) // piece * piece
        for column in range(sequence.registered, known // self.page_size):
            digest = sequence.hash_of(column, self.page_size)
            for pages, own in zip(self.pages, sequence.pages, strict=True):
                if column < len(own) and own[column] != NONE:
                    pages.register(own[column], digest)
            sequence.registered = column + 1

    def find(self, sequence: Sequence) -> int:
        """Holds the pages of others that begin as this sequence does; of windows only what they reach.

        Returns:
            how many tokens need not be computed.
        """
        scored = sequence.request.params.prompt_logprobs is not None and sequence.number == 0
        if not self.config.prefix_cache or scored:  # of whom every token's is computed
            return 0
        size, piece = self.page_size, self.config.piece
        most = len(sequence.tokens) // size
        whole = [pages for pages, window in zip(self.pages, self.windows, strict=True) if window is None]
        found = 0
        while found < most and all(p.find(sequence.hash_of(found, size)) is not None for p in whole):
            found += 1
        for columns in range(found, 0, -1):
            reach = min(columns * size, len(sequence.tokens) - 1)
            if piece is not None and (reach != columns * size or reach % piece):
                continue
            held = [
                self._found(sequence, pages, window, columns, reach)
                for pages, window in zip(self.pages, self.windows, strict=True)
            ]
            if any(own is None for own in held):
                continue
            for pages, own, theirs in zip(self.pages, sequence.pages, held, strict=True):
                own += theirs or []
                for page in own:
                    if page != NONE:
                        pages.hold(page)
            sequence.computed = reach
            return reach
        return 0

    def _found(
        self, sequence: Sequence, pages: Pages, window: int | None, columns: int, reach: int
    ) -> list[int] | None:
        first = 0 if window is None else max(0, reach - window + 1) // self.page_size
        own = [NONE] * min(first, columns)
        for column in range(len(own), columns):
            page = pages.find(sequence.hash_of(column, self.page_size))
            if page is None:
                return None
            own.append(page)
        return own
