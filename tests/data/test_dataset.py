"""Order of the training data: pure, complete, the same for any number of processes; held-out rows, each once."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.data.dataset import CursorMismatch, TokenDataset, make_heldout, shuffled_rows
from jaxllm.data.sequence_packing import pack_concat, pack_documents
from jaxllm.data.token_files import TokenDocuments
from jaxllm.text import ByteTokenizer


def documents(lengths):
    length = np.array(lengths, np.int64)
    tokens = (np.arange(length.sum()) % 256).astype(np.uint16)
    return TokenDocuments(tokens, np.cumsum(length) - length, length, "test", "hash")


def dataset(lengths=(9, 30, 2, 17, 40), *, batch_size=4, seed=0, seq_len=5, pack=pack_concat):
    source = documents(lengths)
    plan = pack(source.starts, source.lengths, seq_len)
    return TokenDataset(source, plan, batch_size, seed, {"seed": seed, "batch_size": batch_size, "content": "a" * 64})


def equal(one, other):
    one, other = (getattr(x, "arrays", x) for x in (one, other))
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


DATASETS = st.builds(
    dataset,
    st.lists(st.integers(0, 40), min_size=1, max_size=15).filter(lambda lengths: max(lengths) > 1),
    batch_size=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    seq_len=st.integers(1, 9),
    pack=st.sampled_from([pack_concat, pack_documents]),
)


@given(data=DATASETS)
@settings(max_examples=50)
def test_every_epoch_holds_every_row_once(data):
    epochs = 3
    steps = -(-epochs * data.rows_per_epoch // data.batch_size)
    order = np.concatenate([data.rows_at(step) for step in range(steps)])
    for epoch in range(epochs):
        rows = order[epoch * data.rows_per_epoch : (epoch + 1) * data.rows_per_epoch]
        np.testing.assert_array_equal(np.sort(rows), np.arange(data.rows_per_epoch))


@given(data=DATASETS, steps=st.lists(st.integers(0, 10**12), min_size=1, max_size=5))
@settings(max_examples=30)
def test_batches_depend_on_the_step_alone(data, steps):
    first = [data.batch_at(step) for step in steps]
    twin = TokenDataset(data.documents, data.plan, data.batch_size, data.seed, data.identity)
    assert all(equal(batch, twin.batch_at(step)) for step, batch in reversed(list(zip(steps, first, strict=True))))


@given(data=DATASETS, step=st.integers(0, 1000), draw=st.data())
@settings(max_examples=50)
def test_shards_make_up_the_global_batch(data, step, draw):
    shards = draw.draw(st.sampled_from([n for n in range(1, data.batch_size + 1) if data.batch_size % n == 0]))
    parts = [data.batch_at(step, shard=n, num_shards=shards) for n in range(shards)]
    assert equal(
        [np.concatenate(part) for part in zip(*(part.arrays for part in parts), strict=True)], data.batch_at(step)
    )


def test_epochs_come_in_another_order():
    data = dataset([400], batch_size=1)
    n = data.rows_per_epoch
    orders = [[int(data.rows_at(epoch * n + place)[0]) for place in range(n)] for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 3


def test_batches_are_int32_of_the_asked_shape():
    for part in dataset().batch_at(3).arrays:
        assert part.shape == (4, 5)
        assert part.dtype == np.int32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_shards": 3}, "4 sequences does not divide evenly over 3 processes; legal numbers of processes: 1, 2, 4"),
        ({"num_shards": 2, "shard": 2}, "shard is 2 of 2; shards count from 0"),
        ({"num_shards": 0}, "does not divide evenly over 0"),
    ],
)
def test_impossible_shards(arguments, message):
    with pytest.raises(ValueError, match=message):
        dataset().batch_at(0, **arguments)
    with pytest.raises(ValueError, match="step is -1; steps count from 0"):
        dataset().batch_at(-1)


def test_cursor_survives_json_and_resumes():
    saved = json.loads(json.dumps(dataset().cursor(17)))
    assert dataset().check_cursor(saved) == 17


def test_cursor_of_other_data_is_refused_in_words():
    saved = dataset().cursor(17)
    other = dataset(seed=1, batch_size=8)
    with pytest.raises(
        CursorMismatch, match=r"seed was 0, is now 1; batch_size was 4, is now 8\. Resume with"
    ) as error:
        other.check_cursor(saved)
    assert error.value.differences == ["seed was 0, is now 1", "batch_size was 4, is now 8"]
    with pytest.raises(CursorMismatch, match=r"content was None, is now aaaaaaaaaaaa\.\.\."):
        dataset().check_cursor({"step": 1, "fingerprint": "x"})


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=15).filter(lambda lengths: max(lengths) > 1),
    batch_size=st.integers(1, 9),
    seq_len=st.integers(1, 9),
    pack=st.sampled_from([pack_concat, pack_documents]),
)
@settings(max_examples=50)
def test_heldout_is_each_row_once_in_order_then_padding(lengths, batch_size, seq_len, pack):
    source = documents(lengths)
    plan = pack(source.starts, source.lengths, seq_len)
    heldout = make_heldout([(source, plan)], batch_size, ByteTokenizer())
    batches = list(heldout)
    assert len(batches) == len(heldout)
    assert all(batch.tokens.shape == (batch_size, seq_len) for batch in batches)
    whole = [np.concatenate(part) for part in zip(*(batch.arrays for batch in batches), strict=True)]
    assert equal([part[: plan.rows] for part in whole], plan.gather(source.tokens, np.arange(plan.rows)))
    rest = [part[plan.rows :] for part in whole]
    assert len(rest[0]) < batch_size
    assert (rest[1] == -1).all()
    assert not rest[2].any()
    targets = whole[1][whole[1] >= 0]
    assert heldout.target_tokens == len(targets)
    assert heldout.target_bytes == len(targets)  # ids below 256: a byte each
    divisor = max(n for n in range(1, batch_size + 1) if batch_size % n == 0)
    parts = [heldout.batch_at(len(heldout) - 1, shard=n, num_shards=divisor) for n in range(divisor)]
    assert equal([np.concatenate(part) for part in zip(*(part.arrays for part in parts), strict=True)], batches[-1])


def test_heldout_batches_are_numbered():
    source = documents([20])
    heldout = make_heldout([(source, pack_concat(source.starts, source.lengths, 5))], 2, ByteTokenizer())
    with pytest.raises(IndexError, match="held-out batch 2 does not exist; there are 2, counted from 0"):
        heldout.batch_at(2)


def test_a_batch_over_two_epochs_has_the_rows_of_both():
    """Rows at positions taken together are those of the positions one by one, over several epochs of five rows."""
    alone = np.concatenate([shuffled_rows(place, 1, 5, 7) for place in range(20)])
    epochs = alone.reshape(4, 5)
    assert (np.sort(epochs, axis=1) == np.arange(5)).all()
    assert len({tuple(epoch) for epoch in epochs.tolist()}) > 1
    for first, count in ((3, 4), (0, 20), (4, 11), (9, 2)):
        np.testing.assert_array_equal(shuffled_rows(first, count, 5, 7), alone[first : first + count])
