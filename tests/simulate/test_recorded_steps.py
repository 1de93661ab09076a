"""Recorded steps: times that are fitted to measured steps, and a simulation with them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllm import cli
from jaxllm.hub import HubModel, decoder_config, export_hf
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.plan.formulas.serving_step import BatchWork, StepCost
from jaxllm.simulate.paper_runner import PaperRunner
from jaxllm.simulate.recorded import RecordedSteps, StepRecorder
from jaxllm.simulate.recorded.recorded_steps import MeasuredStep
from jaxllm.text import ByteTokenizer
from tests import quick
from tests.infer import engines

SOURCE = {
    "model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 272,
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}  # fmt: skip
PROGRAMS = {(True, 4): (0.002, 0.01, 1e-5), (True, 8): (0.004, 0.02, 1e-5), (False, 64): (0.05, 0.0, 2e-5)}
"""Program -> its seconds of a step, of a pass and of a token of context."""


@pytest.fixture
def known() -> RecordedSteps:
    rng, steps = np.random.default_rng(0), list[MeasuredStep]()
    for (decode, rows), (fixed, of_pass, of_context) in PROGRAMS.items():
        for _ in range(9):
            passes, context = int(rng.integers(1, 5)) if decode else 1, float(rng.integers(1, 5000))
            seconds = fixed + of_pass * (passes if decode else 0) + of_context * context
            steps.append(MeasuredStep(rows, decode, passes, context, seconds))
    return RecordedSteps.fit("m", "d", [*steps, MeasuredStep(16, True, 1, 1.0, 9.0)], 0.001)  # one step tells no time


def shape_of(rows: int, decode: bool) -> StepShape:
    spec = engines.engine("roomy").runner.spec
    runner = PaperRunner(spec, engines.ENGINES["roomy"], lambda *_: StepCost())
    return dataclasses.replace(runner.choose(1, 1, decode=decode, full=False), tokens=rows, decode=decode)


def test_times_are_those_of_the_steps(known: RecordedSteps, tmp_path: Path) -> None:
    assert {(one.decode, one.rows) for one in known.programs} == set(PROGRAMS)
    for one in known.programs:
        assert (one.fixed, one.of_pass, one.of_context) == pytest.approx(PROGRAMS[one.decode, one.rows], abs=1e-9)
        assert one.error < 1e-6
    batch = [BatchWork.of([10, 20], [1, 1])]
    four, eight = known(batch, shape_of(4, True), 3), known(batch, shape_of(8, True), 3)
    # Contexts of 11 and 21 tokens grow by one and two: 3 passes over 34 tokens in the middle.
    assert four.seconds == pytest.approx(0.002 + 3 * 0.01 + 1e-5 * 3 * 34)
    assert known(batch, shape_of(6, True), 3).seconds == pytest.approx((four.seconds + eight.seconds) / 2)
    assert known(batch, shape_of(1, True), 3).seconds == pytest.approx(four.seconds)
    assert known([BatchWork.of([0], [30])], shape_of(64, False), 1).seconds == pytest.approx(0.05 + 2e-5 * 30)
    known.write(tmp_path / "steps.json")
    assert RecordedSteps.read(tmp_path / "steps.json") == known
    assert "decode 8" in str(known)


def test_steps_of_one_context_do_not_tell_its_time() -> None:
    steps = [MeasuredStep(32, False, 1, context, 0.1) for context in (20.0, 21.0, 22.0)]
    (one,) = RecordedSteps.fit("m", "d", steps).programs
    assert (one.fixed, one.of_context) == (pytest.approx(0.1), 0.0)
    (one,) = RecordedSteps.fit("m", "d", [*steps, MeasuredStep(32, False, 1, 1021.0, 1.1)]).programs
    assert one.of_context == pytest.approx(1e-3, rel=0.05)


def test_what_was_not_measured_is_refused(known: RecordedSteps, tmp_path: Path) -> None:
    batch = [BatchWork.of([10], [1])]
    with pytest.raises(ValueError, match="16 rows, and decode programs were measured with 4, 8"):
        known(batch, shape_of(16, True), 1)
    with pytest.raises(ValueError, match="of one replica, not of 2"):
        known(batch * 2, shape_of(4, True), 1)
    with pytest.raises(ValueError, match="none of 1 programs ran 3 times"):
        RecordedSteps.fit("m", "d", [MeasuredStep(4, True, 1, 1.0, 1.0)])
    (tmp_path / "other.json").write_text('{"model": "m"}')
    for name in ("none.json", "other.json"):
        with pytest.raises(ValueError, match="jaxllm bench MODEL --record"):
            RecordedSteps.read(tmp_path / name)


def test_steps_of_an_engine_are_recorded() -> None:
    engine, recorder = engines.build(engines.ENGINES["roomy"]), StepRecorder()
    asked = engines.traffic(np.random.default_rng(0), engine.config, 6)
    run, step = engine.runner.run, engine.step
    with recorder.of(engine):
        engines.serve(engine, asked)
    assert (engine.runner.run, engine.step) == (run, step)
    assert len(recorder.steps) == engine.metrics.steps
    assert all(one.seconds > 0 and one.context > 0 for one in recorder.steps)
    found = recorder.fit("tiny")
    assert 0 < found.host < 1
    assert {one.rows for one in found.programs} <= {*engine.config.prompt_buckets, *engine.config.decode_buckets}


@pytest.mark.drawn(1)
def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "jit", quick.jit)
    file, sizes = tmp_path / "steps.json", ["--batches", "2", "--prompt", "20", "--tokens", "12", "--rounds", "3"]
    config = decoder_config(SOURCE)
    export_hf(HubModel(config, quick.params(config), SOURCE), tmp_path / "model")
    ByteTokenizer().save(tmp_path / "model")
    model = str(tmp_path / "model")
    assert cli.main(["bench", model, *sizes, "--record", str(file)]) == 0
    assert "decode 2" in capsys.readouterr().out
    asked = ["simulate", "llama3_8b", "--on", "h100:1", "--trace", "uniform:5", "--lengths", "8/8", "--requests", "20"]
    asked += ["--steps", str(file), "--json", str(tmp_path / "found.json")]
    fits = ["--max-sequences", "2", "--max-batched-tokens", "40"]
    assert cli.main([*asked, *fits, "--html", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr().out
    assert f"steps: those of {model}, measured on cpu" in said
    assert re.search(r"devices busy +\d+%\n", said)  # by what is not known of measured steps
    assert re.search(r"energy per output token +-\n", said)
    assert "time of steps" not in (tmp_path / "page.html").read_text()
    found = json.loads((tmp_path / "found.json").read_text())
    prompt = next(one for one in RecordedSteps.read(file).programs if not one.decode)
    assert found["ttft"]["p50"] == pytest.approx(prompt.seconds(1, 8) + RecordedSteps.read(file).host, rel=0.01)
    for wrong, refused in (
        (["--max-sequences", "4", "--max-batched-tokens", "40"], "--max-sequences 4 needs 4"),
        (["--max-sequences", "2"], "--max-batched-tokens 2048 needs 2048"),
        ([*fits, "--extra-servers", "0.3"], "leave --pools, --extra-servers and --host-ms out"),
        ([*fits, "--host-ms", "1"], "leave --pools, --extra-servers and --host-ms out"),
    ):
        assert cli.main([*asked, *wrong]) == 2
        assert refused in capsys.readouterr().err
    for wrong in (["--speculate", "ngram"], ["--tiers-disk", str(tmp_path)], ["--kv-keep", "chai"]):
        assert cli.main(["bench", model, "--record", str(file), *wrong]) == 2
        assert f"leave {wrong[0]} out" in capsys.readouterr().err
