"""Preference rows: TRL's formats, both completions of an example in one row, labels, the held-out split, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.data import ByteTokenizer, DataConfig, load_dataset
from jaxllm.files import DataError
from jaxllm.infer.llm import encode_prompt
from jaxllm.text import ChatTemplate

TEMPLATE = ChatTemplate(
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }};{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


ASKED = [{"role": "user", "content": "What?"}]
PAIRS: list[dict[str, Any]] = [
    {"prompt": f"q{n}", "chosen": "good" * (n % 3 + 1), "rejected": f"bad{n}"} for n in range(20)
]


def opened(folder: Path, rows: list[dict[str, Any]], template: ChatTemplate | None = None, **fields: Any) -> Any:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared: dict[str, Any] = {
        "content": "preference", "packing": "documents", "tokenizer": "byte", "seq_len": 80, "batch_size": 4,
        "heldout_fraction": 0.0,
    }  # fmt: skip
    return load_dataset(DataConfig(str(folder / "a.jsonl"), **(shared | fields)), ByteTokenizer(), template)


def segments(batch: Any) -> list[tuple[str, str]]:
    """(all inputs, targets) of each segment of a batch, as text."""
    tokenizer, found = ByteTokenizer(), []
    for row in range(len(batch.tokens)):
        for number in range(1, batch.segment_ids[row].max() + 1):
            here = batch.segment_ids[row] == number
            targets = batch.targets[row][here]
            assert batch.positions[row][here].tolist() == list(range(here.sum()))
            found.append((tokenizer.decode(batch.tokens[row][here]), tokenizer.decode(targets[targets >= 0])))
    return found


@pytest.mark.parametrize("adds_bos", [True, False])
def test_texts_begin_as_prompts_do(tmp_path, monkeypatch, adds_bos):
    monkeypatch.setattr(ByteTokenizer, "adds_bos", adds_bos)
    tokenizer = ByteTokenizer()
    for asked in ("q", ""):  # an empty prompt is the token that begins a document, whatever the tokenizer adds
        batch = opened(tmp_path, [{"prompt": asked, "chosen": "good", "rejected": "bad"}] * 8).train.batch_at(0)
        begun = encode_prompt(tokenizer, asked)
        assert batch.tokens[0][: len(begun) + 1].tolist() in [[*begun, ord("g")], [*begun, ord("b")]]


def test_both_completions_are_in_one_row(tmp_path):
    data = opened(tmp_path, PAIRS)
    found = [one for step in range(20) for one in segments(data.train.batch_at(step))]
    for (first, chosen), (second, rejected) in zip(found[::2], found[1::2], strict=True):
        number = rejected.removeprefix("bad")
        assert chosen == "good" * (int(number) % 3 + 1)
        assert first.startswith(f"q{number}g")
        assert second.startswith(f"q{number}b")
    assert {rejected for _, rejected in found[1::2]} == {row["rejected"] for row in PAIRS}
    assert (data.train.batch_at(0).segment_ids.max(axis=1) > 2).any(), "several pairs share a row"
    parts = [data.train.batch_at(3, shard=n, num_shards=2) for n in range(2)]
    assert np.concatenate([part.tokens for part in parts]).tolist() == data.train.batch_at(3).tokens.tolist()
    assert "20 pairs" in data.summary


@pytest.mark.parametrize(
    ("row", "template"),
    [
        ({"prompt": "What?", "chosen": "yes", "rejected": "no"}, None),
        ({"chosen": "What? yes", "rejected": "What? no"}, None),
        ({"prompt": "What?", "chosen": "yes", "rejected": "no"}, TEMPLATE),
        ({"prompt": ASKED, "chosen": said("yes"), "rejected": said("no")}, TEMPLATE),
        ({"chosen": [*ASKED, *said("yes")], "rejected": [*ASKED, *said("no")]}, TEMPLATE),
    ],
)  # fmt: skip
def test_formats(tmp_path, row, template):
    """A prompt of its own or one that both completions begin with, as texts or as messages."""
    (_, chosen), (_, rejected) = segments(opened(tmp_path, [row], template, batch_size=1).train.batch_at(0))[:2]
    assert (chosen.strip().rstrip(";"), rejected.strip().rstrip(";")) == ("yes", "no")


def test_labels(tmp_path):
    """Each labelled completion is beside another prompt's, which has no label; a pair counts as two."""
    rows = [{"prompt": f"q{n}", "completion": f"c{n}", "label": n % 2 == 0} for n in range(6)] + PAIRS[:1]
    data = opened(tmp_path, rows, content="unpaired_preference")
    good = {"c0", "c2", "c4", "good"}
    seen = set()
    for step in range(6):
        batch = data.train.batch_at(step)
        found = segments(batch)
        signs = [
            set(batch.advantages[row][(batch.segment_ids[row] == number) & (batch.targets[row] >= 0)])
            for row in range(4) for number in range(1, batch.segment_ids[row].max() + 1)
        ]  # fmt: skip
        assert (batch.advantages[batch.targets < 0] == 0).all()
        for (_, text), sign, (prompt, other), none in zip(
            found[::2], signs[::2], found[1::2], signs[1::2], strict=True
        ):
            assert sign == {1.0 if text in good else -1.0}
            assert none == {0.0}
            assert other != text
            assert prompt[:2] == f"q{text[1]}" if text[0] == "c" else prompt[:2] == "q0"
            seen.add(text)
    assert seen == {*(f"c{n}" for n in range(6)), "good", "bad0"}
    assert data.train.check_cursor(json.loads(json.dumps(data.train.cursor(4)))) == 4


def test_held_out_by_prompt(tmp_path):
    data = opened(tmp_path, PAIRS + PAIRS, heldout_fraction=0.3)
    held = [one for batch in data.heldout for one in segments(batch)]
    trained = [one for step in range(20) for one in segments(data.train.batch_at(step))]
    assert held
    assert not {text for _, text in held[1::2]} & {text for _, text in trained[1::2]}
    labelled = opened(tmp_path, PAIRS, heldout_fraction=0.3, content="unpaired_preference")
    assert {float(x) for batch in labelled.heldout for x in np.unique(batch.advantages)} == {-1.0, 0.0, 1.0}


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        ({"prompt": "x", "chosen": "y"}, {}, r"a.jsonl:21: no field 'rejected'"),
        ({"chosen": "y", "rejected": "z"}, {}, r"a.jsonl:21: no field 'prompt'.*do not begin alike"),
        ({"chosen": said("y"), "rejected": "z"}, {}, r"'chosen' and 'rejected' are not of one kind"),
        ({"prompt": "x", "chosen": said("y"), "rejected": "z"}, {}, r"'chosen' is a list; without a chat template"),
        (
            {"prompt": "x", "completion": "y", "label": 1},
            {"content": "unpaired_preference"},
            r"a.jsonl:21: 'label' is 1; it must be true or false",
        ),
        ({"prompt": "x", "chosen": "y", "rejected": "z"}, {"seq_len": 3}, r"no example fits a row of data.seq_len = 3"),
    ],
)
def test_bad_records(tmp_path, row, fields, message):
    with pytest.raises(DataError, match=message):
        opened(tmp_path, [*PAIRS, row], **fields)
    if "seq_len" not in fields:
        assert "1 bad records skipped" in opened(tmp_path, [*PAIRS, row], skip_bad_records=True, **fields).summary


def test_settings_without_effect_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"splits pairs; set data.packing='documents'"):
        opened(tmp_path, PAIRS, packing="concat")
    with pytest.raises(ValueError, match=r"data.text_field is set, but has no effect for preferences"):
        opened(tmp_path, PAIRS, text_field="x")
    with pytest.raises(ValueError, match="the bundled corpus has no preferences"):
        load_dataset(DataConfig(content="preference", packing="documents", tokenizer="byte"), ByteTokenizer())
    with pytest.raises(DataError, match=r"'bpe:300', which cannot be trained on preferences"):
        opened(tmp_path, PAIRS, tokenizer="bpe:300")
