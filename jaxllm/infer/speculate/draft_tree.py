"""Draft tree: continuations of a sequence that one step verifies, as many branches as its proposer finds likely.

A step's tokens lie in consecutive slots of the KV cache, parents before children, and each sees its own branch alone
(``pallas_kernels.paged_attention.tree_mask``). A draft without branches is a chain. Verification follows the branch
whose tokens are sampled (SpecExec, arXiv:2406.02532).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pallas_kernels.paged_attention.tree_mask import BITS


class DraftTree(NamedTuple):
    """Draft tree: tokens that may follow a sequence.

    Attributes:
        tokens: draft tokens, each after its parent.
        parents: index of the token that each follows; -1: it follows the sequence.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @classmethod
    def chain(cls, tokens: tuple[int, ...]) -> DraftTree:
        """Draft of one branch."""
        return cls(tokens, tuple(range(-1, len(tokens) - 1)))

    @property
    def is_chain(self) -> bool:
        """Whether it has one branch."""
        return all(parent == number - 1 for number, parent in enumerate(self.parents))

    def first(self, count: int) -> DraftTree:
        """The first tokens."""
        return DraftTree(self.tokens[:count], self.parents[:count])

    def accepted(self, sampled: list[int]) -> int:
        """Number of its tokens that were sampled, one after the other, after the sequence."""
        at = -1
        for depth, token in enumerate(sampled):
            after = (i for i, parent in enumerate(self.parents) if parent == at and self.tokens[i] == token)
            if (child := next(after, None)) is None:
                return depth
            at = child
        return len(sampled)

    def hidden(self, words: int) -> np.ndarray:
        """Words of the tree mask: int32[tokens, words], see ``TreeMask``."""
        seen = np.eye(len(self.tokens), 32 * words, dtype=bool)
        for number, parent in enumerate(self.parents):
            if parent >= 0:
                seen[number] |= seen[parent]
        hidden = np.tri(*seen.shape, -1, dtype=bool) & ~seen
        bits = hidden.reshape(len(self.tokens), words, BITS).astype(np.uint32) << np.arange(BITS, dtype=np.uint32)
        return bits.sum(axis=2, dtype=np.uint32).view(np.int32)


NO_DRAFT = DraftTree()
"""Nothing is proposed."""
