"""KV cache options of the commands, from the command line to the engine."""

from __future__ import annotations

import json

import pytest

from jaxllm import cli


def run(*words: object) -> int:
    """Exit status, whether returned or raised by the argument parser."""
    try:
        return cli.main([str(word) for word in words])
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--kv-format", "kivi9", "legal: ('auto', 'bfloat16', 'int8'"),
        ("--kv-format", "shadowkv:x", "give shadowkv:RANK[,TOKENS[,OUTLIERS]]"),
        ("--kv-format", "int4:3", "has no sizes to give"),
        ("--kv-keep", "chai:1", "give chai:SIZE"),
        ("--kv-keep", "corm:x", "corm"),
    ],
)
def test_what_is_not_legal_is_one_line(option, value, words, finished, capsys):
    assert run("generate", finished / "runs" / "tiny", "--prompt", "a", option, value) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert words in said


def test_what_a_model_cannot_have_is_one_line(finished, capsys):
    """Only the engine knows the model's heads."""
    assert run("generate", finished / "runs" / "tiny", "--prompt", "a", "--kv-format", "shadowkv:9999") == 2
    assert "error: engine: kv_dtype = 'shadowkv:9999,256,1': the keys of a page" in capsys.readouterr().err


@pytest.mark.drawn(0.3)
def test_eval_compares_caches(finished, capsys):
    """Negative log-likelihood, recall and bytes of a cache beside the full one's; a text must have room for a key."""
    model = finished / "runs" / "tiny"
    assert run("eval", model, "--needle", "--max-len", "200", "--kv-format", "int4") == 0
    _, full, packed = capsys.readouterr().out.strip().splitlines()
    assert full.split()[0] == "auto"
    assert "(+0.00%)" in full
    assert "(1.000 of full)" in full
    assert packed.split()[0] == "int4"
    assert 0.1 < float(packed.split("(")[-1].split()[0]) < 0.4
    assert run("eval", model, "--needle", "--max-len", "200", "--kv-keep", "corm:4,16,64") == 0
    evicted = capsys.readouterr().out.strip().splitlines()[2]
    assert evicted.split()[:2] == ["auto", "corm:4,16,64"]
    assert 0.3 < float(evicted.split("(")[-1].split()[0]) < 1.0
    assert run("eval", model, "--needle", "--max-len", "40") == 2
    assert "no room for a pass key" in capsys.readouterr().err


@pytest.mark.drawn(0.3)
def test_a_batch_in_tiers(finished, tmp_path, capsys):
    """A batch is grouped, its pages are encoded, and its prefix cache is on the disk afterwards."""
    source, out, pages = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "pages"
    body = {"model": "tiny", "prompt": "the sea " * 10, "max_tokens": 3}
    rows = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i in range(3)]
    source.write_text("\n".join(map(json.dumps, rows)))
    options = (
        "--policy",
        "grouped",
        "--kv-format",
        "int4",
        "--kv-host",
        "0.01",
        "--kv-disk",
        pages,
        "--max-len",
        "128",
    )
    command = ("generate", finished / "runs" / "tiny", "--batch", source, "--out", out, "--max-sequences", "2")
    assert run(*command, *options) == 0, capsys.readouterr().err
    assert len(out.read_text().splitlines()) == 3
    (folder,) = pages.iterdir()
    assert len(list(folder.glob("*.page"))) >= 2


@pytest.mark.drawn(0.3)
def test_subtasks_that_leave(finished, capsys):
    """A completion with markers, from the command line; markers that are alike are refused."""
    command = (
        "generate",
        finished / "runs" / "tiny",
        "--prompt",
        "the sea",
        "--temperature",
        "0",
        "--max-tokens",
        "30",
    )
    assert run(*command, "--subtask-markers", "e", "t", "--subtasks-kept", "0") == 0
    assert capsys.readouterr().out.startswith("the sea")
    assert run(*command, "--subtask-markers", "e", "e") == 2
    assert "give two different markers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("chat", "smollm2", "--kv-keep", "oldest"), "legal: None, or a row of ('window+sinks'"),
        (("bench", "smollm2", "--kv-format", "kivi2", "--kv-keep", "window+sinks"), "does not go with retention"),
        (("bench", "smollm2", "--kv-format", "kivi2", "--kv-keep", "corm:1"), "does not go with retention"),
        (("serve", "smollm2", "--kv-keep", "locret"), "give locret:HEADS.safetensors"),
        (("generate", "smollm2", "--prompt", "x", "--kv-disk", "pages"), "--kv-disk is for --batch"),
        (("generate", "smollm2", "--prompt", "x", "--policy", "grouped"), "--policy is for --batch"),
        (("generate", "smollm2", "--prompt", "x", "--subtasks-kept", "2"), "--subtasks-kept is for --subtask-markers"),
        (("eval", "smollm2", "--kv-format", "int4"), "--kv-format and --kv-keep are for --needle and --tasks"),
        (("eval", "smollm2", "--needle", "--limit", "3"), "--needle goes with"),
        (("eval", "smollm2", "--needle", "--policy", "grouped"), "--policy is for --tasks"),
    ],
)
def test_what_is_refused_before_a_model_is_loaded(words, said, capsys):
    assert run(*words) == 2
    assert said in capsys.readouterr().err
