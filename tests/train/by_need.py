"""Context parallelism by need, beside documents that are padded each to a row of one device."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from jaxllm.compiler import hlo
from jaxllm.compiler.collectives import CollectiveReader
from jaxllm.data import Batch
from jaxllm.data.context_by_need import ContextSlots
from jaxllm.data.sequence_packing import pack_documents
from pallas_kernels.ring_attention.layout import order

SHORTEST = 3


def mixed_batch(seed: int, rows: int, seq_len: int, vocab_size: int) -> Batch:
    """Rows of documents of 3 to ``seq_len`` tokens, most of them short, with padding between and behind them."""
    rng = np.random.default_rng(seed)
    shape = (rows, seq_len)
    tokens, targets = (rng.integers(0, vocab_size, shape, dtype=np.int32) for _ in range(2))
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row in range(rows):
        at, number = int(rng.integers(0, 2)), 0
        while seq_len - at >= SHORTEST:
            n = min(seq_len - at, int(np.exp(rng.normal(np.log(seq_len) - 1.5, 1.2))))
            n = seq_len if row == 0 and at == 0 else max(n, SHORTEST)
            number += 1
            segments[row, at : at + n], positions[row, at : at + n] = number, np.arange(n)
            at += n + int(rng.random() < 0.2)
    targets[(segments == 0) | (rng.random(shape) < 0.1)] = -1
    return Batch(tokens, targets, segments, positions)


def drawn_batch(seed: int, rows: int, seq_len: int, spread: float) -> Batch:
    """Rows of whole documents, packed by best fit and shuffled; without tokens.

    Args:
        spread: standard deviation of the logarithm of the lengths, whose median is an eighth of a row.
    """
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(np.log(seq_len / 8), spread, 12 * rows)).clip(2, seq_len + 1).astype(np.int64)
    plan = pack_documents(np.zeros(len(lengths), np.int64), lengths, seq_len)
    assert plan.rows >= rows
    return plan.gather(np.zeros(seq_len + 1, np.int32), rng.permutation(plan.rows)[:rows])


def padded(batch: Batch) -> Batch:
    """The same documents, each in a row of its own; as many rows as a batch of this shape can have documents."""
    rows, seq_len = batch.tokens.shape
    shape = (rows * (seq_len // SHORTEST), seq_len)
    found = Batch(*(np.full(shape, fill, np.int32) for fill in (0, -1, 0, 0)))
    documents = ((row, n) for row in range(rows) for n in range(1, batch.segment_ids[row].max() + 1))
    for into, (row, number) in enumerate(documents):
        here = np.flatnonzero(batch.segment_ids[row] == number)
        for whole, part in zip(found.arrays, batch.arrays, strict=True):
            whole[into, : len(here)] = part[row, here]
        found.segment_ids[into, : len(here)] = 1
    return found


def slot_work(slots: ContextSlots, batch: Batch) -> np.ndarray:
    """Pairs of a query and a key that each device computes in each micro-step, [micro-steps, devices]."""
    slotted = slots.arrange(batch)
    pairs = (slotted.rows.positions + 1) * (slotted.rows.segment_ids > 0)
    return pairs.reshape(slots.most, -1, slots.slot).sum(axis=2)[: int(slotted.count)]


def static_work(batch: Batch, rows: int, devices: int, accumulate: int, layout: Any = "zigzag") -> np.ndarray:
    """The same where each row is split over all ``devices`` of ``context``, on ``rows`` rows of devices."""
    b, s = batch.tokens.shape
    pairs = ((batch.positions + 1) * (batch.segment_ids > 0))[:, order(layout, devices, s)]
    pairs = pairs.reshape(b, devices, -1).sum(axis=2)
    micro = pairs.reshape(rows, b // (rows * accumulate), accumulate, devices)
    return micro.sum(axis=1).swapaxes(0, 1).reshape(accumulate, rows * devices)


def imbalance(work: np.ndarray) -> float:
    """Work of the busiest device of each micro-step, over the mean."""
    return float(work.max(axis=1).sum() / work.mean(axis=1).sum())


def ring_bytes(text: str, sizes: int) -> tuple[list[int], int]:
    """Bytes of collective-permutes that a device sends in a compiled program.

    Args:
        text: of the program.
        sizes: number of ring sizes, at least three: then a conditional with as many branches chooses a ring.

    Returns:
        bytes of each branch, over all such conditionals; and the number of collective-permutes outside of them.
    """
    module = hlo.parse(text)
    reader = CollectiveReader(module)

    def sent(computation: Any) -> int:
        found = reader.run(hlo.Frame(computation)).collectives
        return sum(size * count for (kind, _, size, _), count in found.items() if kind == "collective-permute")

    chosen = [
        module.branches(one)
        for computation in module.computations.values()
        for one in computation.instructions.values()
        if one.opcode == "conditional"
    ]
    chosen = [branches for branches in chosen if len(branches) == sizes]
    assert chosen, "no conditional chooses a ring"
    inside = {one.name for branches in chosen for branch in branches for one in reachable(module, branch)}
    outside = sum(
        one.opcode.startswith("collective-permute")
        for computation in module.computations.values()
        if computation.name not in inside
        for one in computation.instructions.values()
    )
    return [sum(sent(branches[i]) for branches in chosen) for i in range(sizes)], outside


def reachable(module: hlo.Module, computation: Any) -> list[Any]:
    """A computation and those that it calls."""
    found: dict[str, Any] = {}
    ahead = [computation]
    while ahead:
        one = ahead.pop()
        if one.name not in found:
            found[one.name] = one
            names = (name for i in one.instructions.values() for name in re.findall(r"[\w.\-]+", i.attributes))
            ahead += [module.computations[name] for name in names if name in module.computations]
    return list(found.values())
