"""Sequence packing: documents of tokens to rows of fixed length. Legend: B batch, S sequence.

A document of n tokens has n - 1 (input, target) pairs: each token but the last is an input, and its target is the next
token. Documents begin with bos and end with eos, so bos is only an input, eos is only a target, and no position of a
row is spent on a token that predicts nothing. A packing plan states which pairs are in which row. It is an index over
the token array (a few integers per piece of a document) and copies no tokens.

- `pack_concat`: all pairs in order, cut every S. All rows but the last are full; documents continue in the next row.
- `pack_documents`: whole documents by best fit decreasing; only documents longer than S are cut.

A piece of a document is one segment: after a cut, the rest starts a new segment, which does not attend to what came
before it, and its positions restart at 0.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int, Integer

from jaxllm.data.batch import Batch
from jaxllm.data.sharded_tokens import ShardedTokens


@dataclass(frozen=True, eq=False)
class PackingPlan:
    """Packing plan: rows of S pairs. Row r has pieces row_offsets[r] .. row_offsets[r + 1] - 1, one segment each.

    piece_start: int64, index in the token array of each piece's first input.
    piece_length: int64, pairs in each piece, at least 1.
    row_offsets: int64, [rows + 1].
    virtual_tokens: places at the start of each row, among its S, that are left to virtual tokens. They have segment 0
        and the positions 0, 1, ...; those of documents are counted from there.
    """

    seq_len: int
    piece_start: Int[np.ndarray, " pieces"]
    piece_length: Int[np.ndarray, " pieces"]
    row_offsets: Int[np.ndarray, " rows_plus_one"]
    virtual_tokens: int = 0

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.row_offsets) - 1

    @property
    def pairs(self) -> int:
        """Positions with a target, over all rows."""
        return int(self.piece_length.sum())

    @property
    def padding(self) -> float:
        """Share of positions that are padding, 0 to 1."""
        return 1.0 - self.pairs / (self.rows * (self.seq_len - self.virtual_tokens))

    @cached_property
    def _pairs_before(self) -> Int[np.ndarray, " pieces_plus_one"]:
        return np.concatenate([[0], np.cumsum(self.piece_length)])

    def gather(
        self,
        tokens: Integer[np.ndarray, " tokens"] | ShardedTokens,
        rows: Int[np.ndarray, " B"],
        loss_mask: Integer[np.ndarray, " tokens"] | None = None,
    ) -> Batch:
        """Gathers rows into a batch; row -1 is all padding. loss_mask: 0 for tokens that are not targets."""
        real = rows >= 0
        first = np.where(real, self.row_offsets[rows], 0)
        count = np.where(real, self.row_offsets[rows + 1] - first, 0)
        row_of_piece = np.repeat(np.arange(len(rows)), count)
        number = _ramp(count)  # index of the piece within its row
        piece = np.repeat(first, count) + number
        length = self.piece_length[piece]
        column = self._pairs_before[piece] - np.repeat(self._pairs_before[first], count)
        place = row_of_piece * self.seq_len + self.virtual_tokens + column

        batch = Batch(*(np.full((len(rows), self.seq_len), fill, np.int32) for fill in (0, -1, 0, 0)))
        flat = inputs, targets, segment_ids, positions = tuple(part.reshape(-1) for part in batch.arrays)
        if len(piece) * _LONG_PIECE < len(rows) * self.seq_len:
            _copy_pieces(flat, tokens, loss_mask, place, self.piece_start[piece], length, number + 1)
            return self._with_virtual_positions(batch)
        position = _ramp(length)
        source = np.repeat(self.piece_start[piece], length) + position
        into = np.repeat(place, length) + position
        inputs[into] = tokens[source]
        target = tokens[source + 1].astype(np.int32)
        targets[into] = target if loss_mask is None else np.where(loss_mask[source + 1], target, -1)
        segment_ids[into] = np.repeat(number + 1, length)
        positions[into] = position
        return self._with_virtual_positions(batch)

    def _with_virtual_positions(self, batch: Batch) -> Batch:
        if self.virtual_tokens:
            batch.positions[:] += self.virtual_tokens * (batch.segment_ids > 0)
            batch.positions[:, : self.virtual_tokens] = np.arange(self.virtual_tokens)
        return batch


_LONG_PIECE = 64
"""Mean tokens per piece above which copying piece by piece is faster than gathering all positions at once."""


def _copy_pieces(
    flat: tuple[np.ndarray, ...],
    tokens: Integer[np.ndarray, " tokens"] | ShardedTokens,
    loss_mask: Integer[np.ndarray, " tokens"] | None,
    place: Int[np.ndarray, " pieces"],
    start: Int[np.ndarray, " pieces"],
    length: Int[np.ndarray, " pieces"],
    segment: Int[np.ndarray, " pieces"],
) -> None:
    """Fills the flattened arrays of a batch piece by piece; the result equals gathering every position."""
    inputs, targets, segment_ids, positions = flat
    ramp = np.arange(int(length.max(initial=0)), dtype=np.int32)
    # Plain views: slicing a memmap repeats its bookkeeping each time.
    tokens = tokens.view(np.ndarray)
    loss_mask = None if loss_mask is None else loss_mask.view(np.ndarray)
    pieces = zip(place.tolist(), start.tolist(), length.tolist(), segment.tolist(), strict=True)
    for into, begin, count, number in pieces:
        end = into + count
        inputs[into:end] = tokens[begin : begin + count]
        targets[into:end] = tokens[begin + 1 : begin + count + 1]
        if loss_mask is not None:
            targets[into:end][loss_mask[begin + 1 : begin + count + 1] == 0] = -1
        segment_ids[into:end] = number
        positions[into:end] = ramp[:count]


def pack_concat(
    starts: Int[np.ndarray, " documents"], lengths: Int[np.ndarray, " documents"], seq_len: int
) -> PackingPlan:
    """Packing plan "concat": all pairs of all documents in order, cut every `seq_len`; only the last row has padding.

    starts, lengths: int64, first index and number of tokens of each document.
    """
    ends = np.cumsum(np.maximum(lengths - 1, 0))
    begins = np.concatenate([[0], ends])  # first pair of each document, and the total
    total = int(begins[-1])
    cuts = np.union1d(begins, np.arange(0, total, seq_len))
    pair, piece_length = cuts[:-1], np.diff(cuts)
    document = np.searchsorted(begins, pair, side="right") - 1
    piece_start = np.asarray(starts, np.int64)[document] + pair - begins[document]
    rows = -(-total // seq_len)
    row_offsets = np.searchsorted(pair, np.minimum(np.arange(rows + 1) * seq_len, total))
    return PackingPlan(seq_len, piece_start, piece_length, row_offsets.astype(np.int64))


def pack_documents(
    starts: Int[np.ndarray, " documents"], lengths: Int[np.ndarray, " documents"], seq_len: int
) -> PackingPlan:
    """Packing plan "documents": whole documents in rows of `seq_len` by best fit decreasing.

    Longer documents are cut into full rows and a rest. Rows, and the documents within a row, keep the order of the
    source as far as the packing allows.
    """
    pairs = np.maximum(np.asarray(lengths, np.int64) - 1, 0)
    pieces = -(-pairs // seq_len)
    document, number = np.repeat(np.arange(len(pairs)), pieces), _ramp(pieces)
    piece_start = np.asarray(starts, np.int64)[document] + number * seq_len
    piece_length = np.minimum(pairs[document] - number * seq_len, seq_len)
    row = best_fit(piece_length, seq_len)
    # Number the rows by their earliest piece, then sort the pieces by row.
    _, earliest, row = np.unique(row, return_index=True, return_inverse=True)
    row = np.argsort(np.argsort(earliest))[row]
    order = np.argsort(row, kind="stable")
    row_offsets = np.concatenate([[0], np.cumsum(np.bincount(row))]).astype(np.int64)
    return PackingPlan(seq_len, piece_start[order], piece_length[order], row_offsets)


def best_fit(lengths: Int[np.ndarray, " pieces"], capacity: int) -> Int[np.ndarray, " pieces"]:
    """Row of each piece by best fit decreasing: longest first, into the fullest row with room (Johnson 1973).

    Pieces of the same length are placed together: a row with room r takes r // length of them at once. One by one, best
    fit would do the same, because the row that it has just filled is now the fullest. So the loop runs over the pairs
    (length, room) that occur, not over pieces.
    """
    row = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    open_rows: dict[int, list[np.ndarray]] = {}  # remaining room -> rows
    rooms = 0  # bit r is set if open_rows[r] has any
    rows = 0
    values, begins, counts = np.unique(-lengths[order], return_index=True, return_counts=True)
    for value, begin, count in zip(values.tolist(), begins.tolist(), counts.tolist(), strict=True):
        length, todo = -value, order[begin : begin + count]
        while len(todo):
            fits = rooms >> length
            if fits:
                room = length + (fits & -fits).bit_length() - 1
                there = np.concatenate(open_rows.pop(room))
                rooms &= ~(1 << room)
            else:
                room = capacity
                needed = -(-len(todo) // (capacity // length))
                there = np.arange(rows, rows + needed)
                rows += needed
            each = room // length
            used = -(-len(todo) // each)  # rows that receive pieces; the last of them may have room for more
            filled = np.full(min(used, len(there)), each)
            filled[-1] = min(each, len(todo) - each * (len(filled) - 1))
            placed = int(filled.sum())
            row[todo[:placed]] = np.repeat(there[: len(filled)], filled)
            todo = todo[placed:]
            for left, bunch in (
                (room - each * length, there[: len(filled) - 1]),
                (room - int(filled[-1]) * length, there[len(filled) - 1 : len(filled)]),
                (room, there[len(filled) :]),
            ):
                if left and len(bunch):
                    open_rows.setdefault(left, []).append(bunch)
                    rooms |= 1 << left
    return row


def pack_one_per_row(
    starts: Int[np.ndarray, " documents"], lengths: Int[np.ndarray, " documents"], seq_len: int
) -> PackingPlan:
    """Packing plan with document d alone in row d, cut to `seq_len`.

    Raises ValueError for a document with fewer than two tokens.
    """
    pairs = np.minimum(np.asarray(lengths, np.int64) - 1, seq_len)
    if (pairs < 1).any():
        raise ValueError(f"document {int(np.argmin(pairs))} has fewer than two tokens, so it has no target")
    return PackingPlan(seq_len, np.asarray(starts, np.int64), pairs, np.arange(len(pairs) + 1))


def _ramp(counts: Int[np.ndarray, " n"]) -> Int[np.ndarray, " total"]:
    """Concatenates 0 .. c - 1 for each count c: [2, 3] -> [0, 1, 0, 1, 2]."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - counts, counts)
