"""Evaluation tasks over the engine: scores equal the training forward's, and lm-eval's requests are answered."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import cli
from jaxllm.evals import Scorer, adapter, run_lm_eval, run_task
from jaxllm.files import DataError
from jaxllm.hub import HubModel, decoder_config, export_hf
from jaxllm.infer import LLM, EngineConfig, load_model
from jaxllm.text import ByteTokenizer
from tests import quick
from tests.infer.test_load_from_elsewhere import SOURCE

LONGEST = 24


@functools.cache
def _model(folder: str) -> str:
    config = decoder_config(SOURCE)
    export_hf(HubModel(config, quick.params(config, seed=2, scale=0.6), SOURCE), Path(folder) / "model")
    ByteTokenizer().save(Path(folder) / "model")
    return str(Path(folder) / "model")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _model(str(tmp_path_factory.mktemp("evals")))


@pytest.fixture(scope="module")
def scorer(model: str) -> Scorer:
    sizes = EngineConfig(
        max_sequences=2,
        max_batched_tokens=16,
        max_len=LONGEST,
        pages=20,
        page_size=8,
        samplers=("full",),
        buckets=(16,),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        return Scorer(LLM(load_model(model), sizes, manifest=None, strict=True))


def logprobs(scorer: Scorer, ids: list[int]) -> np.ndarray:
    """Float[S V] by the training forward."""
    loaded = scorer.llm.loaded
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(ids)] = ids
    logits = quick.logits(loaded.model.config, loaded.params, padded)[0]
    return np.asarray(jax.nn.log_softmax(logits))


def ids_of(text: str) -> list[int]:
    return [int(i) for i in ByteTokenizer().encode(text, bos=True)]


@pytest.mark.drawn(0.3)
def test_continuations_have_the_forwards_log_probability(scorer: Scorer):
    pairs = [("ab", "cde"), ("", "xy"), ("one ", "two"), ("hello", " w")]
    for (context, continuation), (value, greedy) in zip(pairs, scorer.continuations(pairs), strict=True):
        ids = ids_of(context + continuation)
        begin = len(ids_of(context.rstrip()))
        table = logprobs(scorer, ids)
        own = [table[i - 1, ids[i]] for i in range(begin, len(ids))]
        assert value == pytest.approx(sum(own), abs=1e-4)
        assert greedy == all(table[i - 1].argmax() == ids[i] for i in range(begin, len(ids)))


def test_what_greedy_decoding_writes_is_greedy(scorer: Scorer):
    (text,) = scorer.write([("abc", {"max_gen_toks": 4})])
    if text.isascii() and text:
        (value, greedy), (_, other) = scorer.continuations([("abc", text), ("abc", text[:-1] + "\x01")])
        assert greedy
        assert not other
        assert value < 0


def test_long_texts_are_scored_once_in_windows(scorer: Scorer):
    text = "abcdefghijklmnopqrstuvwxyz0123456789" * 1
    ids, most = ids_of(text), LONGEST - 1
    want, scored = 0.0, 1
    while scored < len(ids):
        end = min(len(ids), scored + most - 1)
        window = ids[max(0, end - most) : end]
        table = logprobs(scorer, window)
        want += sum(table[len(window) - n - 1, window[len(window) - n]] for n in range(1, end - scored + 1))
        scored = end
    assert scorer.texts([text]) == pytest.approx([want], abs=1e-3)
    short = "abc"
    table = logprobs(scorer, ids_of(short))
    want = sum(table[i - 1, ids_of(short)[i]] for i in range(1, 4))
    assert scorer.texts([short]) == pytest.approx([want], abs=1e-4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.continuations([("a", "")]), "is empty"),
        (lambda s: s.continuations([("a", "b" * 30)]), "30 tokens does not fit"),
        (lambda s: s.write([("a", {"num_beams": 4})]), r"\['num_beams'\] are not supported"),
        (lambda s: s.write([("a", {"max_gen_toks": 24})]), "max_gen_toks = 24"),
        (lambda s: s.write([("a", {"temperature": -1.0, "do_sample": True})]), "temperature = -1.0"),
    ],
)
def test_what_cannot_be_answered_is_refused(scorer: Scorer, call: Any, words: str):
    with pytest.raises(ValueError, match=words):
        call(scorer)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_tasks_of_ones_own(scorer: Scorer, tmp_path: Path):
    rows = [{"prompt": p, "choices": ["abc", " d", "zz"], "answer": 0} for p in ("q", "hello", "1 2 3")]
    found = []
    for row in rows:
        values = [value for value, _ in scorer.continuations([(row["prompt"], choice) for choice in row["choices"]])]
        sizes = [3, 2, 2]
        found.append(
            (values[0] == max(values), values[0] / 3 == max(v / s for v, s in zip(values, sizes, strict=True)))
        )
    result = run_task(scorer, write(tmp_path / "mine.jsonl", rows))
    assert (result.name, result.rows) == ("mine", 3)
    assert result.metrics == {"acc": np.mean([a for a, _ in found]), "acc_norm": np.mean([b for _, b in found])}
    texts = [{"text": "abcd"}, {"text": "some other text"}]
    bits = run_task(scorer, write(tmp_path / "texts.jsonl", texts)).metrics["bits_per_byte"]
    assert bits == pytest.approx(-sum(scorer.texts([t["text"] for t in texts])) / math.log(2) / 19)
    settings = {"until": ["\n"], "max_gen_toks": 8}
    made = scorer.write([("ab", settings)])[0]
    assert "\n" not in made


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"text": "a"}', "{"], ":2: not valid JSON"),
        (['{"text": "a"}', '{"prompt": "a", "target": "b"}'], r":2: has the fields \['prompt', 'target'\]"),
        (['{"question": "a"}'], r":1: has the fields \['question'\]; give"),
        (['{"prompt": "a", "choices": ["b"], "answer": 1}'], ":1: answer = 1 of 1 choices"),
        ([""], "no rows"),
    ],
)
def test_rows_that_are_no_task_are_named(scorer: Scorer, tmp_path: Path, lines: list[str], words: str):
    path = tmp_path / "task.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=words):
        run_task(scorer, path)


@dataclasses.dataclass
class Instance:
    """A request of lm-eval's."""

    args: tuple[Any, ...]


@pytest.fixture
def lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's documented interface: a base class with three methods, and a function that asks them."""

    class LM:
        def __init__(self) -> None:
            self.rank, self.world_size = 0, 1

    def simple_evaluate(model: Any, tasks: list[str], limit: int | None) -> dict[str, Any]:
        assert isinstance(model, LM)
        (score,) = model.loglikelihood([Instance(("ab", "c"))])
        (text,) = model.loglikelihood_rolling([Instance(("abc",))])
        (made,) = model.generate_until([Instance(("abc", {"until": ["\n"], "max_gen_toks": 3}))])
        return {"results": {task: {"score": score[0], "text": text, "made": made, "limit": limit} for task in tasks}}

    package, api, models = (types.ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"))
    models.LM, package.simple_evaluate = LM, simple_evaluate  # type: ignore[attr-defined]
    for module in (package, api, models):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_lm_eval_is_answered(scorer: Scorer, lm_eval: None):
    results = run_lm_eval(scorer, ["one", "two"], limit=3)
    assert set(results) == {"one", "two"}
    assert results["one"]["score"] == scorer.continuations([("ab", "c")])[0][0]
    assert results["one"]["text"] == scorer.texts(["abc"])[0]
    assert results["one"]["limit"] == 3
    assert isinstance(results["one"]["made"], str)


def test_without_lm_eval_its_tasks_are_refused(scorer: Scorer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(DataError, match="need lm-eval: pip install lm-eval"):
        adapter(scorer)


@pytest.mark.drawn(0.3)
def test_the_command(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "jit", quick.jit)
    task = write(tmp_path / "mine.jsonl", [{"prompt": "a", "choices": ["b", "c"], "answer": 0}] * 3)
    assert cli.main(["eval", model, "--tasks", str(task), "--limit", "2", "--max-len", "64"]) == 0
    assert "mine: 2 rows, acc" in capsys.readouterr().out
    assert cli.main(["eval", model, "--tasks", "nowhere.jsonl"]) == 2
    assert "there is no file nowhere.jsonl" in capsys.readouterr().err
    assert cli.main(["eval", model, "--limit", "2"]) == 2
    assert "--limit, --dtype and --weights are for --tasks" in capsys.readouterr().err
    assert cli.main(["bench", model, "--batches", "1", "--prompt", "8", "--tokens", "8", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert "of the memory's roofline" in out
    sizes = ["--batches", "1", "--prompt", "20", "--tokens", "8", "--rounds", "1"]
    assert cli.main(["bench", model, *sizes, "--kv-keep", "corm:2,4,8"]) == 0
    assert re.search(r"corm:2,4,8: [1-9]\S* entries kept and [1-9]\S* dropped", capsys.readouterr().out)
    assert cli.main(["bench", model, "--tokens", "1"]) == 2
