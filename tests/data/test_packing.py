"""Sequence packing: nothing lost, nothing twice, nothing across documents, for both packings."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.data import sequence_packing
from jaxllm.data.sequence_packing import pack_concat, pack_documents

PACKINGS = {"concat": pack_concat, "documents": pack_documents}
LENGTHS = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 60)), min_size=1, max_size=40)

each_packing = pytest.mark.parametrize("pack", PACKINGS.values(), ids=PACKINGS)


def corpus(lengths: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, starts, lengths): token t is t itself, so a packed token tells where it came from."""
    length = np.array(lengths, np.int64)
    return np.arange(length.sum(), dtype=np.uint16), np.cumsum(length) - length, length


def all_rows(plan: sequence_packing.PackingPlan, tokens: np.ndarray):
    return plan.gather(tokens, np.arange(plan.rows))


@each_packing
@given(lengths=LENGTHS, seq_len=st.integers(1, 20))
@settings(max_examples=60)
def test_every_pair_of_every_document_appears_exactly_once(pack, lengths, seq_len):
    tokens, starts, length = corpus(lengths)
    batch = all_rows(pack(starts, length, seq_len), tokens)
    real = batch.segment_ids > 0
    inputs, targets = batch.tokens[real], batch.targets[real]
    expected = np.concatenate([np.arange(s, s + max(n - 1, 0)) for s, n in zip(starts, length, strict=True)])
    np.testing.assert_array_equal(np.sort(inputs), expected)
    np.testing.assert_array_equal(targets, inputs + 1)  # the token that follows in the same document


@each_packing
@given(lengths=LENGTHS, seq_len=st.integers(1, 20))
@settings(max_examples=60)
def test_segments_and_positions(pack, lengths, seq_len):
    tokens, starts, length = corpus(lengths)
    plan = pack(starts, length, seq_len)
    batch = all_rows(plan, tokens)
    document_of = np.repeat(np.arange(len(length)), length)
    for inputs, targets, segments, positions in zip(*batch.arrays, strict=True):
        used = int((segments > 0).sum())
        assert used > 0
        # Padding is a tail of zeros without targets.
        assert not segments[used:].any()
        assert not positions[used:].any()
        assert (targets[used:] == -1).all()
        # Segments are 1, 2, 3, ... and each is one stretch of one document, positions from 0.
        step = np.diff(segments[:used], prepend=0)
        assert set(step.tolist()) <= {0, 1}
        assert step[0] == 1
        for segment in range(1, segments.max() + 1):
            there = segments == segment
            np.testing.assert_array_equal(positions[there], np.arange(there.sum()))
            np.testing.assert_array_equal(inputs[there], inputs[there][0] + np.arange(there.sum()))
            assert len(set(document_of[inputs[there]].tolist())) == 1
    assert plan.pairs == (batch.segment_ids > 0).sum()
    assert plan.padding == pytest.approx((batch.segment_ids == 0).mean()) if plan.rows else True


@given(lengths=LENGTHS, seq_len=st.integers(1, 20))
@settings(max_examples=60)
def test_concat_keeps_order_and_pads_only_the_end(lengths, seq_len):
    tokens, starts, length = corpus(lengths)
    batch = all_rows(pack_concat(starts, length, seq_len), tokens)
    stream = batch.tokens.reshape(-1)[batch.segment_ids.reshape(-1) > 0]
    assert (np.diff(stream.astype(np.int64)) > 0).all()
    real = batch.segment_ids.reshape(-1) > 0
    assert real[: real.sum()].all()
    assert (~real).sum() < seq_len


@given(lengths=LENGTHS, seq_len=st.integers(1, 20))
@settings(max_examples=60)
def test_documents_are_cut_only_when_they_must_be(lengths, seq_len):
    _, starts, length = corpus(lengths)
    plan = pack_documents(starts, length, seq_len)
    pairs = np.maximum(length - 1, 0)
    assert len(plan.piece_start) == (-(-pairs // seq_len)).sum()
    assert np.add.reduceat(plan.piece_length, plan.row_offsets[:-1]).max(initial=0) <= seq_len if plan.rows else True


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60), capacity=st.integers(30, 50))
@settings(max_examples=60)
def test_best_fit_equals_the_textbook_loop(lengths, capacity):
    """The grouped placement leaves the rows as full as best fit decreasing done one piece at a time."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - length)
    row = sequence_packing.best_fit(np.array(lengths, np.int64), capacity)
    filled = np.bincount(row, weights=lengths)
    assert sorted(capacity - filled) == sorted(rooms)


def test_best_fit_is_dense_on_long_tailed_lengths(rng):
    lengths = np.minimum(rng.lognormal(6, 1, 5000).astype(np.int64) + 2, 20_000)
    plan = pack_documents(np.cumsum(lengths) - lengths, lengths, 4096)
    assert plan.padding < 0.01


@each_packing
@given(lengths=LENGTHS, seq_len=st.integers(1, 20), data=st.data())
@settings(max_examples=30)
def test_any_rows_in_any_order_and_padding_rows(pack, lengths, seq_len, data):
    tokens, starts, length = corpus(lengths)
    plan = pack(starts, length, seq_len)
    whole = all_rows(plan, tokens)
    wanted = np.array(data.draw(st.lists(st.integers(-1, plan.rows - 1), max_size=8)), np.int64)
    for part, full in zip(plan.gather(tokens, wanted).arrays, whole.arrays, strict=True):
        assert part.shape == (len(wanted), seq_len)
        assert part.dtype == np.int32
        np.testing.assert_array_equal(part[wanted >= 0], full[wanted[wanted >= 0]])
    batch = plan.gather(tokens, wanted)
    assert (batch.targets[wanted < 0] == -1).all()
    assert not batch.segment_ids[wanted < 0].any()


def test_by_hand():
    """Two documents of 4 and 3 tokens (bos 0, eos 9) in rows of 4."""
    tokens = np.array([0, 5, 6, 9, 0, 7, 9], np.uint16)
    starts, lengths = np.array([0, 4]), np.array([4, 3])
    batch = all_rows(pack_concat(starts, lengths, 4), tokens)
    assert batch.tokens.tolist() == [[0, 5, 6, 0], [7, 0, 0, 0]]
    assert batch.targets.tolist() == [[5, 6, 9, 7], [9, -1, -1, -1]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 2], [1, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0], [0, 0, 0, 0]]
    batch = all_rows(pack_documents(starts, lengths, 4), tokens)
    assert batch.tokens.tolist() == [[0, 5, 6, 0], [0, 7, 0, 0]]
    assert batch.targets.tolist() == [[5, 6, 9, -1], [7, 9, -1, -1]]


@each_packing
@given(lengths=LENGTHS, seq_len=st.integers(1, 20), masked=st.booleans(), data=st.data())
@settings(max_examples=30)
def test_copying_pieces_equals_gathering_places(pack, lengths, seq_len, masked, data):
    tokens, starts, length = corpus(lengths)
    plan = pack(starts, length, seq_len)
    trained = (tokens % 3 > 0).astype(np.uint8) if masked else None
    rows = np.array(data.draw(st.lists(st.integers(-1, plan.rows - 1), max_size=8)), np.int64)
    found = []
    for long_piece in (0, 1 << 40):  # always, never
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sequence_packing, "_LONG_PIECE", long_piece)
            found.append(plan.gather(tokens, rows, trained))
    for one, other in zip(*(batch.arrays for batch in found), strict=True):
        np.testing.assert_array_equal(one, other)
    if masked:
        real = found[0].targets >= 0
        assert (found[0].targets[real] % 3 > 0).all()
        assert (found[0].targets >= -1).all()


@pytest.mark.parametrize("long_piece", [0, 1 << 40])
def test_loss_masks_by_hand(long_piece, monkeypatch):
    """A target is masked by its own flag, not by that of the input before it; piece by piece and all at once."""
    monkeypatch.setattr(sequence_packing, "_LONG_PIECE", long_piece)
    tokens, mask = np.arange(10, 20).astype(np.uint16), np.array([0, 1, 0, 1, 1, 0, 0, 1, 1, 0], np.uint8)
    plan = pack_documents(np.array([0, 6]), np.array([6, 4]), 8)
    batch = plan.gather(tokens, np.arange(plan.rows), mask)
    assert batch.targets.tolist() == [[11, -1, 13, 14, -1, 17, 18, -1]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 1, 1, 2, 2, 2]]
