"""``jaxllm data``: each command on small files, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxllm import cli, data
from jaxllm.cli.commands.data import COMMANDS
from jaxllm.text import load_tokenizer
from tests.test_cli import run

TEXTS = [f"The cat number {n} is on the mat, and it is not in the house of the man." for n in range(30)]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))


@pytest.mark.drawn(1)
def test_help_and_mistakes(capsys):
    assert run("data") == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in COMMANDS)
    assert run("data", "statz") == 2
    assert "no command 'statz'. Did you mean 'stats'?" in capsys.readouterr().err
    for name in COMMANDS:
        assert run("data", name, "--help") == 0
    capsys.readouterr()
    for words, message in (
        (["stats"], "no input"),
        (["stats", "b.jsonl"], "b.jsonl: no such file"),
        (["pack", "a.jsonl"], "give one of --tokenizer and --model"),
        (["tokenize", "a.jsonl", "--tokenizer", "byte", "--out", "x"], "the name of a token file must end in .bin"),
        (["pack", "a.jsonl", "--tokenizer", "byte", "--content", "chat"], "no chat template"),
        (
            ["rephrase", "a.jsonl", "--out", "o", "--url", "http://x/v1", "--model", "m", "--styles", "qq"],
            "no style 'qq'",
        ),
    ):
        assert run("data", *words) == 2, words
        assert message in capsys.readouterr().err


@pytest.mark.drawn(1)
def test_inspect_and_stats(capsys):
    Path("b.jsonl").write_text(json.dumps({"text": "x"}) + "\n{\n")
    assert run("data", "inspect", "a.jsonl", "b.jsonl", "--skip-bad-records", "--show", "1") == 0
    out, err = capsys.readouterr()
    assert "a.jsonl: 30 documents\nb.jsonl: 1 documents" in out
    assert TEXTS[0] in out
    assert TEXTS[1] not in out
    assert "1 bad records skipped:\n  b.jsonl:2: not valid JSON" in err
    assert run("data", "stats", "a.jsonl", "--tokenizer", "byte") == 0
    out = capsys.readouterr().out
    assert "languages  en 100.0%" in out
    assert "tokens" in out


def test_tokenize_gives_what_training_takes(capsys):
    assert run("data", "tokenize", "a.jsonl", "--tokenizer", "bpe:300", "--out", "a.bin") == 0
    assert "a.bin: 30 documents" in capsys.readouterr().out
    config = data.DataConfig("a.bin", tokenizer="a", seq_len=16, heldout_fraction=0.0)
    dataset = data.load_dataset(config)
    assert [dataset.tokenizer.decode(one) for one in dataset.train.documents] == TEXTS
    assert load_tokenizer("a").vocab_size == 300


@pytest.mark.drawn(1)
def test_pack_draws_a_picture(capsys):
    command = ["pack", "a.jsonl", "--tokenizer", "byte", "--seq-len", "256", "--picture", "p.png"]
    assert run("data", *command) == 0
    out = capsys.readouterr().out
    assert "concat " in out
    assert "documents " in out
    assert "% padding" in out
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


def test_dedup_and_contamination(capsys):
    Path("b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS[:3], TEXTS[0].upper()]))
    assert run("data", "dedup", "b.jsonl", "--out", "c.jsonl", "--exact") == 0
    assert "4 documents: 1 exact duplicates, 0 near-duplicates; c.jsonl: 3 documents" in capsys.readouterr().out
    assert [json.loads(line)["text"] for line in Path("c.jsonl").read_text().splitlines()] == TEXTS[:3]
    Path("e.jsonl").write_text(json.dumps({"question": "cat number 7 is on the mat and it is not in the house"}) + "\n")
    command = ["contamination", "a.jsonl", "--evals", "e.jsonl", "--evals-field", "question", "--out", "d.jsonl"]
    assert run("data", *command) == 1
    assert "1 of 1 items (100.0%) share 13 words in a row with 1 documents" in capsys.readouterr().out
    kept = [json.loads(line)["text"] for line in Path("d.jsonl").read_text().splitlines()]
    assert kept == [text for n, text in enumerate(TEXTS) if n != 7]
    assert run("data", "contamination", "d.jsonl", *command[2:-2]) == 0


def test_data_errors_are_one_line(capsys):
    Path("b.jsonl").write_text('{"text": "x"}\n{\n')
    assert cli.main(["data", "stats", "b.jsonl"]) == 2
    assert capsys.readouterr().err.startswith("error: b.jsonl:2: not valid JSON")
