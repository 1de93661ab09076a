"""A run that takes a second: one block, a few hundred lines of made-up text, twelve steps."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxllm.checkpoint import CheckpointConfig
from jaxllm.config import to_dict
from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.train import RunConfig, train
from jaxllm.train import run as preparing
from jaxllm.train.evaluate import Evaluator
from jaxllm.train.records.live_view import LiveView
from jaxllm.train.records.run_directory import RunDirectory

STEPS = 12
WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "some",
    "rats",
    "who",
    "ran",
    "into",
    "the",
    "dark",
    "house",
)


def write_text(folder: Path, documents: int = 40) -> Path:
    """Sentences over a few words: learnable within a few steps."""
    rng = random.Random(5)
    lines = [" ".join(rng.choices(WORDS, k=12)) for _ in range(documents)]
    file = folder / "text.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n<|endoftext|>\n".join(lines) + "\n")
    return file


def run_config(folder: Path, **fields: Any) -> RunConfig:
    """The configuration of a run on ``folder``'s text; ``fields`` by name, those of optim, data and checkpoint too."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(folder)
    config = RunConfig(
        name="tiny",
        model=DecoderConfig(
            vocab_size=280,
            embed_dim=16,
            layers=1,
            pattern=(BlockConfig(AttentionConfig(heads=2, kv_heads=1, head_dim=8), MlpConfig(hidden=16)),),
        ),
        data=DataConfig(
            source=str(text),
            heldout_fraction=0.15,
            tokenizer="byte",
            seq_len=16,
            batch_size=8,
            cache_dir=str(folder / "cache"),
        ),
        optim=OptimConfig(schedule=ScheduleConfig(peak=1e-2)),
        steps=STEPS,
        checkpoint=CheckpointConfig(every=4, saving="blocking"),
        log_every=1,
        out=str(folder / "runs"),
    )
    for room in ("data", "optim", "checkpoint"):
        part = getattr(config, room)
        inside = {name: fields.pop(name) for name in list(fields) if name in {f.name for f in dataclasses.fields(part)}}
        config = dataclasses.replace(config, **{room: dataclasses.replace(part, **inside)})
    return dataclasses.replace(config, **{name: str(v) if name == "out" else v for name, v in fields.items()})


_steps: dict[Any, Any] = {}
_evaluations: dict[Any, Any] = {}


@contextlib.contextmanager
def shared_programs() -> Iterator[None]:
    """Runs in such blocks of this process that need the same training step, or evaluation, share one program.

    Tracing and compiling them is most of what a tiny run costs. Processes that resume a run have programs of their own:
    see tests/proofs/first_run/resume.py, and the tests that start ``jaxllm train``. A step with state in files or in
    uneven parts is its run's own: it has those.
    """
    compile_step, init = preparing.Run.compile_step, Evaluator.__init__
    sharing = True

    def settings() -> tuple[bool, ...]:
        return tuple(jax.config.read(name) for name in ("jax_enable_x64", "jax_disable_most_optimizations"))

    def compiled(self: preparing.Run) -> Any:
        if not sharing or self.config.disk.directory or self.config.parallel.state_shares:
            return compile_step(self)
        # What tests replace decides on the program too.
        replaced = tuple(getattr(preparing, f"build_{what}") for what in ("value_and_grad", "step", "optimizer"))
        key = _deciding(self.config), str(self.mesh), settings(), replaced
        if key not in _steps:
            _steps[key] = compile_step(self)
        return _steps[key]

    def initialised(self: Evaluator, model: Any, mesh: Any, dataset: Any, sums: Any = None, **more: Any) -> None:
        init(self, model, mesh, dataset, sums, **more)
        if sharing and sums is None:
            self._sums = _evaluations.setdefault((model, settings()), self._sums)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing.Run, "compile_step", compiled)
        patch.setattr(Evaluator, "__init__", initialised)
        try:
            yield
        finally:
            sharing = False  # a test that replaces them too, and undoes it later, puts these functions back


def _deciding(config: RunConfig) -> str:
    """The settings that determine a run's step: all but its directories, its data and its log, as JSON."""
    fields = to_dict(config)
    for name in ("name", "out", "checkpoint", "log_every", "eval_every", "init_from"):
        del fields[name]
    fields["data"] = {name: fields["data"][name] for name in ("batch_size", "seq_len")}
    fields["spikes"].pop("limit")
    return json.dumps(fields, default=str)


def losses(directory: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of each training row."""
    return [
        (row["step"], row["loss"], row["grad_norm"]) for row in RunDirectory(directory).read_metrics() if "nll" in row
    ]


def signal_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGTERM) -> None:
    """This process gets a signal when a view first shows ``step``."""
    show, seen = LiveView.step, set()

    def shown(self: LiveView, at: int, metrics: dict[str, float]) -> None:
        show(self, at, metrics)
        first = at not in seen
        seen.add(at)
        if at == step and first:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(LiveView, "step", shown)


def stopped_at(folder: Path, step: int, **fields: Any) -> Path:
    """The directory of a run that a signal stopped after ``step`` steps."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        signal_at(monkeypatch, step - 1)
        result = train(run_config(folder, **fields))
    assert (result.complete, result.signal, result.steps) == (False, signal.SIGTERM, step)
    return result.directory
