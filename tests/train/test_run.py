"""Training run from start to directory: its files, its stops, its resumes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllm.checkpoint import CheckpointCorruptError, Checkpointer
from jaxllm.config import ConfigError, from_dict
from jaxllm.data import CursorMismatch, DataConfig, load_dataset
from jaxllm.models import functional
from jaxllm.train import NonFiniteLossError, ResumeError, RunConfig, TrainState, loop, run, train
from jaxllm.train.records.run_directory import RunDirectory
from sharding import ShardingError
from tests import environment, tiny
from tests.train import runs
from tests.train.runs import STEPS, losses, run_config, stopped_at

pytestmark = pytest.mark.usefixtures("shared_programs")


def hashes(directory: Path, step: int = STEPS) -> dict[str, str]:
    """Hashes of every leaf of a checkpoint."""
    with Checkpointer(directory / "checkpoints", read_only=True) as checkpointer:
        return {path: leaf.hash for path, leaf in checkpointer.manifest(step).leaves.items()}


def checkpoint_steps(directory: Path) -> list[int]:
    with Checkpointer(directory / "checkpoints", read_only=True) as checkpointer:
        return checkpointer.steps()


def assert_same_run(directory: Path, other: Path) -> None:
    """Bit for bit: every step's loss and gradient norm, once and in order, and every leaf of each state both saved.

    The states come first, the earliest before the others: where two runs part is then between two of them.
    """
    saved = sorted({*checkpoint_steps(directory)} & {*checkpoint_steps(other)})
    assert saved[-1:] == [STEPS]
    for step in saved:
        assert hashes(directory, step) == hashes(other, step), f"the states after step {step} differ"
    assert losses(directory) == losses(other)


# What a run leaves


def test_one_row_of_metrics_for_every_step(finished):
    rows = RunDirectory(finished / "runs" / "tiny").read_metrics()
    steps = [row for row in rows if "nll" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    for row in steps:
        assert row.keys() == {
            "step", "loss", "nll", "grad_norm", "param_norm", "update_norm", "learning_rate", "tokens",
            "tokens_per_second", "step_seconds", "data_wait", "memory_bytes", "seconds",
        }  # fmt: skip
        assert all(math.isfinite(value) for value in row.values())
        assert row["loss"] == row["nll"], "no z-loss here"
    assert steps[-1]["nll"] < steps[0]["nll"] - 1, "it learns"
    assert steps[0]["nll"] == pytest.approx(math.log(280), abs=1.0), "it starts near a uniform guess"
    (heldout,) = [row for row in rows if "nll" not in row]
    assert heldout["step"] == STEPS
    assert heldout["heldout_bits_per_byte"] > 0


def test_the_directory_explains_the_run(finished):
    directory = RunDirectory(finished / "runs" / "tiny")
    assert from_dict(RunConfig, json.loads(directory.config.read_text())) == run_config(finished)
    assert directory.plot.read_bytes().startswith(b"\x89PNG")
    assert len(directory.plot.read_bytes()) > 5000
    assert checkpoint_steps(directory.path) == [4, 8, 12]
    left = {path.name for path in directory.path.iterdir()}
    assert left == {
        "config.json", "metrics.jsonl", "events.jsonl", "loss.png", "tokenizer", "checkpoints", "receipt.json"
    }  # fmt: skip
    receipt = json.loads(directory.receipt.read_text())
    last = [row for row in directory.read_metrics() if "nll" in row][-1]
    assert receipt["result"]["nll"] == last["nll"]
    assert receipt["result"]["steps"] == STEPS
    assert receipt["versions"]["jax"] == jax.__version__


def test_a_finished_run_started_again_stays_as_it_is(copied, finished, tmp_path):
    config = run_config(finished, out=tmp_path)
    directory = RunDirectory(copied)
    directory.write_json(directory.receipt, {"made": "by the commit that trained it"})
    before = directory.read_metrics()
    result = train(config)
    assert (result.complete, result.steps) == (True, STEPS)
    assert result.evaluation is not None
    after = directory.read_metrics()
    assert [row["step"] for row in after] == [row["step"] for row in before]
    assert losses(copied) == losses(finished / "runs" / "tiny")
    assert json.loads(directory.receipt.read_text()) == {"made": "by the commit that trained it"}


# Stopping and going on


def test_a_signal_saves_and_the_next_start_goes_on_bit_for_bit(stopped, finished, tmp_path):
    assert [row[0] for row in losses(stopped)] == [1, 2, 3, 4, 5, 6, 7], "the last step's row is there too"
    assert checkpoint_steps(stopped) == [4, 7]
    assert not (stopped / "receipt.json").exists()
    assert train(run_config(finished, out=tmp_path)).complete
    assert_same_run(stopped, finished / "runs" / "tiny")


def test_a_signal_during_compilation_makes_one_step_and_saves_it(finished, tmp_path):
    with pytest.MonkeyPatch.context() as monkeypatch:
        compile_step = run.Run.compile_step
        monkeypatch.setattr(
            run.Run, "compile_step", lambda self: (os.kill(os.getpid(), signal.SIGINT), compile_step(self))[1]
        )
        result = train(run_config(finished, out=tmp_path))
    assert (result.complete, result.signal, result.steps) == (False, signal.SIGINT, 1)
    assert checkpoint_steps(result.directory) == [1]
    assert losses(result.directory) == losses(finished / "runs" / "tiny")[:1]


@pytest.mark.drawn(0.3)
def test_a_signal_during_an_evaluation_loses_nothing(finished, tmp_path, monkeypatch):
    """Between the question whether to save and the one whether to stop lies an evaluation, which takes its time."""
    record = loop.record_evaluation

    def interrupted(evaluation, step, log, view):
        record(evaluation, step, log, view)
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop, "record_evaluation", interrupted)
    result = train(run_config(finished, eval_every=3, out=tmp_path))
    assert not result.complete
    assert checkpoint_steps(result.directory)[-1] == result.steps == len(losses(result.directory))
    assert train(run_config(finished, eval_every=3, out=tmp_path)).complete
    assert_same_run(result.directory, finished / "runs" / "tiny")
    rows = RunDirectory(result.directory).read_metrics()
    assert [row["step"] for row in rows if "heldout_nll" in row] == [3, 6, 9, 12], "once each"


def test_signal_handlers_are_put_back():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with loop.stop_signals():
        assert signal.getsignal(signal.SIGTERM) not in handlers
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_second_signal_of_a_kind_acts_as_usual():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts deaf to it
    with loop.stop_signals() as stopping:
        signal.raise_signal(signal.SIGINT)
        assert stopping == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


RECIPE = """
import time
from pathlib import Path
from jaxllm.train.records.live_view import LiveView
from tests.train.runs import run_config

show = LiveView.step
LiveView.step = lambda *args: (time.sleep(0.3), show(*args))  # time for a signal to come between two steps

def tiny():
    return run_config(Path({text!r}), out={out!r})
"""


def start(finished: Path, folder: Path) -> subprocess.Popen:
    """``jaxllm train`` in a process of its own, with as many devices as there are here."""
    (folder / "recipe.py").write_text(RECIPE.format(text=str(finished), out=str(folder)))
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={environment.DEVICES}"
    env = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(environment.ROOT)} | environment.compiled_alike()
    command = [sys.executable, "-m", "jaxllm.cli", "train", str(folder / "recipe.py") + ":tiny"]
    with (folder / "log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=folder)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_process_ends_on_a_signal_and_the_run_goes_on(number, finished, tmp_path):
    directory = tmp_path / "tiny"
    process, before = start(finished, tmp_path), len(losses(directory))
    deadline = time.monotonic() + 120
    while len(losses(directory)) == before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    status = process.wait(timeout=60)
    log = (tmp_path / "log").read_text()
    assert status == 128 + number, log
    assert f"Stopped after step {len(losses(directory))}; saved." in log
    assert checkpoint_steps(directory)[-1] == len(losses(directory))
    assert train(run_config(finished, out=tmp_path)).complete
    assert_same_run(directory, finished / "runs" / "tiny")


# Changed settings


def test_changed_mathematics_are_listed_and_refused(copied, finished, tmp_path):
    config = run_config(finished, out=tmp_path)
    block = config.model.pattern[0]
    wider = dataclasses.replace(block, mlp=dataclasses.replace(block.mlp, hidden=24))
    changed = dataclasses.replace(
        config,
        seed=1,
        z_loss=0.5,
        model=dataclasses.replace(config.model, pattern=(wider,)),
        optim=dataclasses.replace(config.optim, b2=0.9),
        log_every=7,
    )
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    with pytest.raises(ResumeError) as raised:
        train(changed)
    message = str(raised.value)
    listed = {line.strip() for line in message.splitlines() if line.startswith("  ")}
    assert listed == {
        "seed: 0 -> 1",
        "z_loss: 0.0 -> 0.5",
        "model.pattern.0.mlp.hidden: 16 -> 24",
        "optim.b2: 0.95 -> 0.9",
    }
    assert str(copied) in message
    assert "--name" in message
    after = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    assert {p: b for p, b in after.items() if p.name != ".lock"} == {
        p: b for p, b in before.items() if p.name != ".lock"
    }


def test_runtime_settings_may_change_and_are_written_down(stopped, finished, tmp_path):
    changed = run_config(finished, log_every=5, eval_every=100, every=5, keep_last=1, out=tmp_path)
    assert train(changed).complete
    assert_same_run(stopped, finished / "runs" / "tiny")
    assert checkpoint_steps(stopped) == [12]
    assert from_dict(RunConfig, json.loads((stopped / "config.json").read_text())) == changed


@pytest.mark.drawn(0.3)
def test_another_mesh_goes_on_with_the_same_numbers(stopped, finished, tmp_path):
    assert train(run_config(finished, mesh="fsdp_tp", out=tmp_path)).complete
    found, want = np.array(losses(stopped)), np.array(losses(finished / "runs" / "tiny"))
    np.testing.assert_array_equal(found[:7], want[:7])
    np.testing.assert_array_equal(found[:, 0], want[:, 0])
    np.testing.assert_allclose(found[7:], want[7:], rtol=2e-4)  # float32 sums in another order, through five updates


def test_checkpoints_are_sharded_as_the_mesh_says(finished, tmp_path):
    """The state that goes on under fsdp is really split: each device holds its part."""
    ready = run.Run(run_config(finished, mesh="fsdp", out=tmp_path))
    with Checkpointer(finished / "runs" / "tiny" / "checkpoints", read_only=True) as checkpointer:
        state, _ = checkpointer.restore(ready.abstract)
    assert isinstance(state, TrainState)
    for tree in (state.params, state.opt_state[1].mu, state.opt_state[1].nu):
        up = tree["segments"]["0"]["0"]["mlp"]["up"]
        assert up.addressable_shards[0].data.size == up.size // 8
    assert int(state.step) == STEPS


# Damage


@pytest.mark.parametrize("victim", ["array", "meta"])
def test_a_corrupt_checkpoint_is_stepped_over(victim, stopped, finished, tmp_path, caplog):
    newest = next(path for path in (stopped / "checkpoints").iterdir() if path.is_dir() and path.name.endswith("7"))
    files = [path for path in newest.rglob("*") if path.is_file()]
    file = max(files, key=lambda path: path.stat().st_size) if victim == "array" else newest / "meta.json"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert train(run_config(finished, out=tmp_path)).complete
    assert "CORRUPT CHECKPOINT, going back to step 4" in caplog.text
    assert_same_run(stopped, finished / "runs" / "tiny")
    assert any(path.name.startswith("corrupt_") for path in (stopped / "checkpoints").iterdir()), "kept for a look"


def test_no_good_checkpoint_is_an_error_and_not_a_new_run(copied, finished, tmp_path):
    for file in (copied / "checkpoints").rglob("*"):
        if file.is_file() and file.stat().st_size > 500:
            file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(CheckpointCorruptError, match="is good"):
        train(run_config(finished, out=tmp_path))


def test_metrics_after_the_checkpoint_are_written_again(tmp_path):
    """A kill leaves rows of steps after the last checkpoint, the last row truncated."""
    directory = RunDirectory(tmp_path)
    rows = [{"step": step, "nll": 1.0} for step in range(1, 10)]
    directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 10, "loss": 4.2, "nl')
    assert directory.read_metrics() == rows
    directory.drop_metrics_after(6)
    assert directory.metrics.read_text() == "".join(json.dumps(row) + "\n" for row in rows[:6])
    directory.drop_metrics_after(0)
    assert directory.metrics.read_text() == ""


# Losses that are no numbers


def test_a_loss_that_is_nan_stops_with_its_step_and_keeps_the_good_checkpoint(stopped, finished, tmp_path):
    """The learning rate is normal for seven steps and then is not."""
    with pytest.MonkeyPatch.context() as explode:
        wild = lambda config, model: run_build_optimizer(dataclasses.replace(config, optim=huge(config.optim)), model)  # noqa: E731
        explode.setattr(run, "build_optimizer", wild)
        with pytest.raises(NonFiniteLossError) as raised:
            train(run_config(finished, every=1, out=tmp_path))
    rows = losses(stopped)
    assert all(math.isfinite(value) for row in rows for value in row)
    step = len(rows) + 1
    message = str(raised.value)
    assert message.startswith(f"step {step}: loss ")
    # Good means that its parameters gave a loss and gradients. The newest ones did not: they are out of the way.
    good = checkpoint_steps(stopped)[-1]
    assert good == step - 2 >= 7
    assert f"The checkpoint of step {good} is good" in message
    (aside,) = [path for path in (stopped / "checkpoints").iterdir() if path.name.startswith("aside_")]
    assert f"That of step {step - 1} leads here and is now {aside}" in message


run_build_optimizer = run.build_optimizer


def huge(config):
    schedule = dataclasses.replace(config.schedule, kind="constant", peak=1e35)
    return dataclasses.replace(config, schedule=schedule)


def test_a_run_that_explodes_before_any_checkpoint_says_so(finished, tmp_path):
    config = run_config(finished, every=1, out=tmp_path)
    config = dataclasses.replace(config, optim=huge(config.optim))
    with pytest.raises(NonFiniteLossError, match=r"step 2: .* No checkpoint is good. That of step 1 leads here"):
        train(config)
    assert checkpoint_steps(tmp_path / "tiny") == []


# What does not fit


def test_another_tokenizer_under_the_same_name_is_refused(finished, tmp_path):
    byte, bpe = (load_dataset(run_config(finished, tokenizer=name).data).tokenizer for name in ("byte", "bpe:280"))
    byte.save(tmp_path / "tokenizer")
    config = {"tokenizer": str(tmp_path / "tokenizer"), "out": tmp_path}
    directory = stopped_at(finished, 3, **config)
    shutil.rmtree(tmp_path / "tokenizer")
    bpe.save(tmp_path / "tokenizer")
    with pytest.raises(ResumeError, match="trained with another tokenizer") as raised:
        train(run_config(finished, **config))
    assert byte.fingerprint[:12] in str(raised.value)
    assert bpe.fingerprint[:12] in str(raised.value)
    # The way out that the message offers.
    assert str(directory / "tokenizer") in str(raised.value)


def test_other_text_under_the_same_name_is_refused(finished, tmp_path):
    stopped_at(tmp_path, 2, out=tmp_path)
    runs.write_text(tmp_path, documents=39)
    with pytest.raises(CursorMismatch, match="documents") as raised:
        train(run_config(tmp_path, out=tmp_path))
    assert "content" in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"mesh": "data=3"}, ShardingError, "needs 3 devices, but there are 8"),
        ({"batch_size": 12}, ShardingError, r'batch = 12 cannot be split 8 ways.*nearest.*"data=4,tensor=2"'),
        ({"accumulate": 2}, ShardingError, r"micro-batch \(data.batch_size / accumulate\): batch = 4"),
        ({"source": "no/such.txt"}, ValueError, "no/such.txt"),
        (
            {"model": tiny.decoder(vocab_size=256, dtype="float32")},
            ConfigError,
            "vocab_size = 256.*'byte' has 272.*272 or more",
        ),
        ({"model": tiny.decoder(vocab_size=272)}, ConfigError, "float64.*JAX_ENABLE_X64"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_it_starts(fields, error, words, tmp_path):
    with pytest.raises(error, match=words):
        run.Run(run_config(tmp_path, **fields))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steps": 0}, "steps = 0; give 1 or more"),
        ({"accumulate": 0}, "accumulate = 0"),
        ({"accumulate": 3}, r"accumulate = 3 does not divide data.batch_size = 16; legal: \[1, 2, 4, 8, 16\]"),
        ({"z_loss": -1.0}, "z_loss = -1.0"),
        ({"log_every": 0}, "log_every = 0"),
        ({"eval_every": -1}, "eval_every = -1"),
    ],
)
def test_impossible_runs_are_refused_in_a_sentence(fields, words):
    with pytest.raises(ValueError, match=words):
        RunConfig(data=DataConfig(batch_size=16), **fields)


def test_the_models_tokens_fit_the_configured_model(finished):
    """The saved parameters are those of the architecture in the configuration."""
    config = run_config(finished)
    with Checkpointer(finished / "runs" / "tiny" / "checkpoints", read_only=True) as checkpointer:
        params, meta = checkpointer.restore_params()
    want = functional(config.model).abstract()
    assert jax.tree.map(lambda leaf: leaf.shape, params) == jax.tree.map(lambda leaf: leaf.shape, want)
    assert from_dict(RunConfig, meta["config"]) == config


def test_programs_are_shared_only_inside_the_block():
    """A function that a test replaces inside, and puts back after the end, shares nothing any more."""
    compiled: list[object] = []
    with pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context() as late:
        patch.setattr(run.Run, "compile_step", lambda self: compiled.append(self))
        with runs.shared_programs():
            late.setattr(run.Run, "compile_step", None)
        late.undo()
        run.Run.compile_step("a run")  # type: ignore[arg-type]
    assert compiled == ["a run"]
