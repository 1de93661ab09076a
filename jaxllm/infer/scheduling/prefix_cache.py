"""Prefix cache: KV cache pages of a common prefix are registered by hash and shared by later requests.

The hash is of the page's tokens, of all tokens before them, and of a salt, ``prefix_salt``: pages are shared only by
sequences whose keys and values would be computed to the same numbers.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

from jaxllm.infer.chunks.cached_chunks import Reuse
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.page_store import Page, PageStore
from jaxllm.infer.scheduling.page_allocator import NO_PAGE, PageAllocator, page_hash
from jaxllm.infer.scheduling.sequence import Request, Sequence


def prefix_salt(config: EngineConfig, *, client: str = "", adapter: str = "", inputs: str = "") -> bytes:
    """Salt of a sequence's pages: a hash of everything besides its tokens that changes its keys and values.

    This is the one place that collects it: whatever else changes a sequence's numbers becomes an argument here.

    Args:
        config: configuration of the engine: the format of its KV cache and its retention rule.
        client: salt that the client asked for, see ``Engine.submit``.
        adapter: name and version of the adapter that changes the weights for this sequence.
        inputs: hash of inputs that are not tokens, such as images.
    """
    parts = {"client": client, "adapter": adapter, "inputs": inputs, "kv": config.kv_dtype, "rule": config.retention}
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).digest()


def chunk_hashes(request: Request, reuse: Reuse, page_size: int) -> list[bytes]:
    """Hashes of a chunk's whole pages, those of its lead before them: of a prompt of both and nothing else."""
    found, before = list[bytes](), request.salt
    text = [*request.prompt[: reuse.lead], *request.prompt[reuse.origin : reuse.end]]
    for at in range(0, len(text) - page_size + 1, page_size):
        before = page_hash(before, text[at : at + page_size])
        found.append(before)
    return found


@dataclass(frozen=True)
class PrefixCache:
    """Prefix cache of a scheduler: registers and finds the pages of its pools.

    Attributes:
        config: configuration of the engine.
        windows: sliding window of each layer group, or None.
        pages: page allocator of each layer group.
        page_size: positions of a page.
        residual: latest tokens of a sequence that are not in pages, see ``residual_window``.
        store: tiers behind the device; None: there are none.
        restores: pages that ``restore`` has allocated and whose contents are to be copied to the device, by (layer
            group, page).
        spills: evicted pages that are to be copied to the store: (layer group, page, hash).
    """

    config: EngineConfig
    windows: list[int | None]
    pages: list[PageAllocator]
    page_size: int
    residual: int = 0
    store: PageStore | None = None
    restores: dict[tuple[int, int], tuple[bytes, Page]] = field(default_factory=dict)
    spills: list[tuple[int, int, bytes]] = field(default_factory=list)

    def register(self, sequence: Sequence) -> None:
        """Registers the pages of a sequence whose tokens are known and computed."""
        if not self.config.prefix_cache:
            return
        # What a run in flight computes, which may be cancelled, is not known.
        in_runs = self.config.draft_runs > 1
        known = min(sequence.computed, len(sequence.tokens) - in_runs) - self.residual
        if (chunk := self.config.prefill_chunk) is not None:  # only pages that every request computes in the same way
            known = min(known, len(sequence.request.prompt)) // chunk * chunk
        for column in range(sequence.registered, known // self.page_size):
            digest = sequence.page_hash(column, self.page_size)
            for pages, own in zip(self.pages, sequence.pages, strict=True):
                if column < len(own) and own[column] != NO_PAGE:
                    pages.register(own[column], digest)
            sequence.registered = column + 1

    def restore(self, sequence: Sequence) -> None:
        """Makes the pages of a sequence's prefix that the page store has cached pages of the device.

        Their contents are in ``restores`` until the next step copies them, before it computes anything.
        """
        if self.store is None or not self.config.prefix_cache:
            return
        pinned: list[tuple[PageAllocator, int]] = []
        for column in range(len(sequence.tokens) // self.page_size):
            digest, found = sequence.page_hash(column, self.page_size), False
            for group, pages in enumerate(self.pages):
                page = pages.find(digest)
                if page is not None:
                    pages.share(page)
                elif (digest, group) in self.store and pages.available > 0:
                    if (content := self.store.get((digest, group))) is None:
                        continue
                    page = pages.allocate()
                    self._collect_evicted()
                    pages.register(page, digest)
                    self.restores[group, page] = digest, content
                else:
                    continue
                pinned.append((pages, page))
                found = True
            if not found:
                break
        for pages, page in reversed(pinned):
            pages.release(page)

    def take_transfers(self) -> tuple[list[tuple[int, int, bytes]], list[tuple[int, int, Page]]]:
        """(evicted pages to copy to the store, pages to copy from it), as a plan has them; each is given out once."""
        self._collect_evicted()
        spills = list(self.spills)
        restores = [(group, page, content) for (group, page), (_, content) in self.restores.items()]
        self.spills.clear()
        self.restores.clear()
        return spills, restores

    def registered(self) -> list[tuple[int, int, bytes]]:
        """All pages that requests may find: (layer group, page, hash)."""
        return [(g, *one) for g, pages in enumerate(self.pages) for one in pages.registered()]

    def _collect_evicted(self) -> None:
        """Adds evicted pages to ``spills``, but those whose contents have not been copied to them yet."""
        for group, pages in enumerate(self.pages):
            for page, digest in pages.evicted or ():
                pending = self.restores.get((group, page))
                if pending is not None and pending[0] == digest:
                    del self.restores[group, page]  # the store has it
                elif self.store is not None and (digest, group) not in self.store:
                    self.spills.append((group, page, digest))
            if pages.evicted is not None:
                pages.evicted.clear()

    def reuse(self, sequence: Sequence) -> int:
        """Shares the cached pages of the sequence's longest cached prefix; with windows, only the pages in reach.

        Returns:
            number of tokens that need no prefill; the request keeps it, unless the sequence resumes after a preemption.
        """
        self.restore(sequence)
        found = self._reuse(sequence)
        if sequence.number == 0 and len(sequence.tokens) == len(sequence.request.prompt):
            sequence.request.cached_tokens = found
        return found

    def _reuse(self, sequence: Sequence) -> int:
        scored = sequence.request.params.prompt_logprobs is not None and sequence.number == 0
        if not self.config.prefix_cache or scored:  # prompt log-probabilities need the logits of every token
            return 0
        size, chunk = self.page_size, self.config.prefill_chunk
        most = len(sequence.tokens) // size
        whole = [pages for pages, window in zip(self.pages, self.windows, strict=True) if window is None]
        found = 0
        while found < most and all(p.find(sequence.page_hash(found, size)) is not None for p in whole):
            found += 1
        for columns in range(found, 0, -1):
            reach = min(columns * size, len(sequence.tokens) - 1)
            if chunk is not None and (reach != columns * size or reach % chunk):
                continue
            if self.residual and reach != columns * size:
                continue  # no token is written to an encoded page
            cached = [
                self._find(sequence, pages, window, columns, reach)
                for pages, window in zip(self.pages, self.windows, strict=True)
            ]
            if any(own is None for own in cached):
                continue
            for pages, own, theirs in zip(self.pages, sequence.pages, cached, strict=True):
                own += theirs or []
                for page in own:
                    if page != NO_PAGE:
                        pages.share(page)
            sequence.computed = sequence.found = reach
            return reach
        return 0

    def chunk_pages(self, sequence: Sequence, reuse: Reuse) -> list[list[int]] | None:
        """Pages of a cached chunk by layer group, those that have what a sequence reuses; None if one is missing."""
        size, hashes = self.page_size, chunk_hashes(sequence.request, reuse, self.page_size)
        turn = reuse.origin - reuse.lead
        first, stop = (sequence.computed - turn) // size, -(-(reuse.stop - turn) // size)
        held = [[NO_PAGE] * first + [pages.find(one) for one in hashes[first:stop]] for pages in self.pages]
        return None if any(page is None for own in held for page in own) else held  # pyright: ignore[reportReturnType]

    def has_chunk(self, request: Request, reuse: Reuse) -> bool:
        """Whether all whole pages of a chunk are in the prefix cache."""
        hashes = chunk_hashes(request, reuse, self.page_size)
        return all(pages.find(one) is not None for pages in self.pages for one in hashes)

    def _find(
        self, sequence: Sequence, pages: PageAllocator, window: int | None, columns: int, reach: int
    ) -> list[int] | None:
        """Cached pages of one layer group for a prefix of ``columns`` pages; None if one is missing."""
        first = 0 if window is None else max(0, reach - window + 1) // self.page_size
        own = [NO_PAGE] * min(first, columns)
        for column in range(len(own), columns):
            page = pages.find(sequence.page_hash(column, self.page_size))
            if page is None:
                return None
            own.append(page)
        return own
