"""Common pages: which of a decode step's sequences begin with the same pages, to be read once for all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from jaxllm.infer.scheduling.page_allocator import NO_PAGE


def common_pages(pages: Sequence[Sequence[int]], computed: Sequence[int], page_size: int) -> list[int]:
    """Number of first pages of each sequence that are read once for all that have them; 0 for the other sequences.

    Of all sets of sequences with the same first pages, the one is chosen that saves the most reads; two sequences at
    least have them, and none writes to them.

    Args:
        pages: pages of each sequence.
        computed: tokens of each that are in pages before the step.
        page_size: positions of a page.
    """
    whole = [own[: count // page_size] for own, count in zip(pages, computed, strict=True)]
    best, members, found = 0, list[int](), 0
    together = defaultdict[tuple[int, ...], list[int]](list)
    together[()] = [number for number, own in enumerate(whole) if own and own[0] != NO_PAGE]
    depth = 0
    while together:
        deeper = defaultdict[tuple[int, ...], list[int]](list)
        for own in together.values():
            for number in own:
                if len(whole[number]) > depth:
                    # Pages that are equal at a column, and at all before it.
                    deeper[(own[0], whole[number][depth])].append(number)
        depth += 1
        together = defaultdict(list, {key: own for key, own in deeper.items() if len(own) > 1})
        for own in together.values():
            if (saved := (len(own) - 1) * depth) > best:
                best, members, found = saved, own, depth
    chosen = set(members)
    return [found if number in chosen else 0 for number in range(len(whole))]
