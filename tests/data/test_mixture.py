"""Mixtures from configuration to batches; their arithmetic is in tests/proofs/data/mixing.py."""

import json
from decimal import Decimal

import numpy as np
import pytest

from jaxllm import data
from jaxllm.config import from_dict, to_dict
from jaxllm.data.mixture import MixtureDataset, MixtureSource, exact_shares, source_order
from jaxllm.data.sequence_packing import pack_concat
from jaxllm.data.token_files import TokenDocuments


@pytest.fixture
def folder(tmp_path):
    for name, rows in (("a", 40), ("b", 10), ("c", 25)):
        text = "".join(json.dumps({"text": f"{name}{n} " * 9}) + "\n" for n in range(rows))
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def source(folder, name, **settings):
    return data.SourceConfig(name, str(folder / f"{name}.jsonl"), **settings)


def config(folder, *sources, **settings):
    base = {"tokenizer": "byte", "seq_len": 16, "batch_size": 4, "heldout_fraction": 0.0, "packing": "documents"}
    return data.DataConfig(mixture=sources, cache_dir=str(folder / "cache"), **(base | settings))


def test_order_of_sources_by_hand():
    assert source_order(exact_shares([1, 1])).tolist() == [0, 1]
    assert sorted(source_order(exact_shares([3, 1])).tolist()) == [0, 0, 0, 1]
    assert len(source_order(exact_shares([0.7, 0.2, 0.1]))) == 10
    with pytest.raises(ValueError, match=r"common denominator .*at most 100,000 is supported"):
        exact_shares([1 / 3, 1])
    with pytest.raises(ValueError, match="each is a positive number"):
        exact_shares([1.0, 0.0])


def test_summary_cursor_and_heldout(folder):
    mixed = config(folder, source(folder, "a", weight=2), source(folder, "b"), heldout_fraction=0.2)
    dataset = data.load_dataset(mixed)
    assert isinstance(dataset.train, data.MixtureDataset)
    assert dataset.summary.startswith("a: 66.7% of ")
    assert "\nb: 33.3% of " in dataset.summary
    assert dataset.heldout is not None
    texts = [dataset.tokenizer.decode(one) for one in dataset.heldout.documents]
    assert {text[0] for text in texts} == {"a", "b"}
    assert sum(int((batch.targets >= 0).sum()) for batch in dataset.heldout) == dataset.heldout.target_tokens
    saved = json.loads(json.dumps(dataset.train.cursor(9)))
    through_json = from_dict(data.DataConfig, json.loads(json.dumps(to_dict(mixed))))
    assert data.load_dataset(through_json).train.check_cursor(saved) == 9
    heavier = config(folder, source(folder, "a", weight=3), source(folder, "b"), heldout_fraction=0.2)
    with pytest.raises(data.CursorMismatch, match=r"a weight was 2.0, is now 3.0"):
        data.load_dataset(heavier).train.check_cursor(saved)
    with pytest.raises(data.CursorMismatch, match=r"b content was .*, is now None"):
        data.load_dataset(config(folder, source(folder, "a", weight=2), heldout_fraction=0.2)).train.check_cursor(saved)


def test_a_source_that_is_used_up_is_named_before_training(folder):
    sources = source(folder, "a"), source(folder, "b", max_epochs=2)
    refused = data.load_dataset(config(folder, *sources)).train
    with pytest.raises(data.DataError, match=r"mixture: 'b' \(\d+ rows, max_epochs 2\) is exhausted after"):
        refused.check_steps(1000)
    dataset = data.load_dataset(config(folder, *sources, when_exhausted="renormalise"))
    dataset.train.check_steps(10**9)
    (ending,) = dataset.train.exhausted_sources()
    assert ending[0] == "b"
    assert f"b ends in step {ending[1]}" in dataset.summary
    before, after = (dataset.train.rows_at(step)[0] for step in (ending[1] - 1, ending[1] + 1))
    assert before.tolist().count(1) == 2
    assert after.tolist() == [0, 0, 0, 0]
    all_end = config(folder, source(folder, "a", max_epochs=1), sources[1], when_exhausted="renormalise")
    with pytest.raises(data.DataError, match=r"'a' .*all other sources are exhausted before"):
        data.load_dataset(all_end).train.check_steps(10**6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "x.txt"}, "data.source and data.mixture are both set; set it in the mixture's sources"),
        ({"heldout": "x.txt"}, "data.heldout and data.mixture are both set; set heldout_fraction"),
        ({"text_field": "x"}, "data.text_field and data.mixture are both set"),
    ],
)
def test_settings_that_do_not_go_together(folder, settings, message):
    with pytest.raises(ValueError, match=message.split(";")[0]):
        config(folder, source(folder, "a"), **settings)


def test_more_settings_that_cannot_be_meant(folder):
    with pytest.raises(ValueError, match=r"two sources of data.mixture are called 'a'"):
        config(folder, source(folder, "a"), source(folder, "a"))
    with pytest.raises(ValueError, match="'a': weight is 0; it must be"):
        source(folder, "a", weight=0)
    with pytest.raises(ValueError, match="'a': max_epochs is -1; legal"):
        source(folder, "a", max_epochs=-1)
    with pytest.raises(ValueError, match="has no name"):
        data.SourceConfig("")
    with pytest.raises(ValueError, match=r"data.when_exhausted is set, but has no effect without data.mixture"):
        data.DataConfig(when_exhausted="renormalise")
    with pytest.raises(data.DataError, match="cannot be trained on a mixture"):
        data.load_dataset(config(folder, source(folder, "a"), source(folder, "b"), tokenizer="bpe:300"))
    with pytest.raises(ValueError, match=r"data.workers is -1"):
        data.DataConfig(workers=-1)


def in_memory(name: str, rows: int, weight: float, max_epochs: float | None) -> MixtureSource:
    """Source of rows of two targets each."""
    tokens = np.zeros(2 * rows + 1, np.uint16)
    documents = TokenDocuments(tokens, np.array([0]), np.array([len(tokens)]), name, "x")
    return MixtureSource(name, documents, pack_concat(documents.starts, documents.lengths, 2), weight, max_epochs)


LIMITED = [("a", 50, 9, None), ("b", 100, 1, "0.29"), ("c", 10, 1, "0.999")]
"""(name, rows, weight, max_epochs); as binary fractions 0.29 x 100 is less than 29."""


def test_max_epochs_by_an_independent_count():
    """The allowed rows by decimal arithmetic; the last steps by counting every row of every batch."""
    size, allowed = 4, {name: int(Decimal(limit) * rows) for name, rows, _, limit in LIMITED if limit}
    assert allowed == {"b": 29, "c": 9}
    limited = [in_memory(name, rows, weight, limit and float(limit)) for name, rows, weight, limit in LIMITED]
    endless = MixtureDataset(tuple(in_memory(*one[:3], None) for one in LIMITED), size, 0, {})
    order = [LIMITED[k][0] for step in range(120) for k in endless.rows_at(step)[0].tolist()]
    # Refused: the first row that a source may not give.
    had = dict.fromkeys("abc", 0)
    while had[name := order[sum(had.values())]] != allowed.get(name):
        had[name] += 1
    enough = sum(had.values()) // size
    refused = MixtureDataset(tuple(limited), size, 0, {})
    refused.check_steps(enough)
    with pytest.raises(data.DataError, match=f"'{name}' .*is exhausted after {enough} of {enough + 1} steps"):
        refused.check_steps(enough + 1)
    # Renormalised: each source gives all that it may, and its last row in the step that is named.
    going = MixtureDataset(tuple(limited), size, 0, {}, renormalise=True)
    last, had = {}, dict.fromkeys("abc", 0)
    for step in range(120):
        for k in going.rows_at(step)[0].tolist():
            had[LIMITED[k][0]] += 1
            last[LIMITED[k][0]] = step
    assert {name: had[name] for name in allowed} == allowed
    assert going.exhausted_sources() == sorted(((name, last[name]) for name in allowed), key=lambda one: one[1])


def test_a_source_without_a_row_is_refused():
    """A hundredth of ten rows is none, and it would be the first in order."""
    sources = in_memory("b", 10, 1, None), in_memory("a", 10, 9, 0.01)
    with pytest.raises(data.DataError, match=r"'a' \(10 rows, max_epochs 0.01\) is exhausted after 0 of 1 steps"):
        MixtureDataset(sources, 2, 0, {}).check_steps(1)
    going = MixtureDataset(sources, 2, 0, {}, renormalise=True)
    going.check_steps(100)
    assert going.rows_consumed(3) == {"b": 6, "a": 0}
    with pytest.raises(data.DataError, match=r"'a' .*exhausted after 0 of 1 steps"):
        MixtureDataset(sources[1:], 2, 0, {}, renormalise=True).check_steps(1)
