"""Program loader: the first programs at once, the others behind, and steps that take what is ready."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass

import pytest

from jaxllm.infer import EngineConfig, SamplingParams
from jaxllm.infer.runner.program_loader import ProgramLoader
from jaxllm.infer.runner.step.step_shape import StepShape, by_usefulness, smallest_fitting
from jaxllm.infer.start_progress import StartCancelled, StartProgress
from tests.infer import engines


@dataclass(frozen=True)
class Named:
    name: str


NAMES = [Named(name) for name in "abcde"]


class Gate:
    """Loads a program once it is let through."""

    def __init__(self, *open_: str):
        self.begun: list[str] = []
        self.open, self.changed = set(open_), threading.Condition()

    def let(self, *names: str) -> None:
        with self.changed:
            self.open |= set(names)
            self.changed.notify_all()

    def __call__(self, program: Named) -> str:
        with self.changed:
            self.begun.append(program.name)
            assert self.changed.wait_for(lambda: program.name in self.open, 20)
        return program.name.upper()


def test_the_first_programs_are_there_and_the_others_follow_in_order():
    gate, told = Gate("a", "b"), []
    loader = ProgramLoader(NAMES, gate, 2, lambda *what: told.append(what))
    assert sorted(loader) == ["a", "b"]
    assert not loader.complete
    assert sorted(gate.begun) == ["a", "b"], "nothing else begins before the engine is there"
    assert told == [("compiling", 0, 5), ("compiling", 1, 5), ("compiling", 2, 5)]
    loader.start()
    gate.let("c", "d", "e")
    loader.wait()
    assert loader.complete
    assert {name: loader[name] for name in loader} == {name: name.upper() for name in "abcde"}
    assert told[-1] == ("ready", 5, 5)
    assert len({one for one in told if one[0] == "ready"}) == 4
    with pytest.raises(KeyError):
        loader["z"]


def test_whoever_needs_a_program_waits_for_it_and_it_comes_next():
    gate = Gate("a", "b")
    loader, found = ProgramLoader(NAMES, gate, 2), list[str]()
    loader.start()
    thread = threading.Thread(target=lambda: found.append(loader["e"]))
    thread.start()
    while [p.name for p in loader._queue][:1] != ["e"] and "e" not in gate.begun:
        time.sleep(0.001)
    gate.let("c", "e")
    thread.join(20)
    assert found == ["E"]
    gate.let("d")
    loader.wait()


def test_a_failure_among_the_first_is_raised_and_one_behind_leaves_the_others(caplog):
    def load(program: Named) -> str:
        if program.name in wrong:
            raise ValueError(f"{program.name} is too large")
        return program.name

    wrong = {"b"}
    with pytest.raises(ValueError, match="b is too large"):
        ProgramLoader(NAMES, load, 2)
    wrong = {"d"}
    loader = ProgramLoader(NAMES, load, 2)
    loader.start()
    for use in (loader.wait, lambda: loader["d"]):
        with pytest.raises(ValueError, match="d is too large"):
            use()
    assert sorted(loader) == ["a", "b", "c", "e"]
    assert "program d could not be compiled: d is too large" in caplog.text


def test_a_loader_that_is_stopped_begins_no_other_program():
    gate = Gate("a", "b")
    loader = ProgramLoader(NAMES, gate, 2)
    loader.start()
    while len(gate.begun) < 3:
        time.sleep(0.001)
    loader.stop()
    gate.let("c", "d", "e")
    loader.wait()
    assert "e" not in loader
    with pytest.raises(KeyError):
        loader["e"]


def test_a_cancelled_start_ends_at_its_next_program():
    progress = StartProgress()
    gate = Gate("a")
    loading = threading.Thread(target=lambda: ended.append(_error(gate, progress)))
    ended: list[BaseException | None] = []
    loading.start()
    while not progress.done:
        time.sleep(0.001)
    progress.cancel()
    gate.let("b", "c", "d", "e")
    loading.join(20)
    assert isinstance(ended[0], StartCancelled)
    assert len(gate.begun) < 5


def _error(gate: Gate, progress: StartProgress) -> BaseException | None:
    try:
        ProgramLoader(NAMES, gate, 5, progress)
    except StartCancelled as error:
        return error
    return None


def shape(tokens: int, decode: bool = False, full: bool = True) -> StepShape:
    return StepShape(min(tokens, 64), 4, decode, full, 4, 8, 1, 8, 5, "float32")


SHAPES = [shape(t, d, f) for d, sizes in ((False, (64, 16)), (True, (4, 2, 1))) for t in sizes for f in (False, True)]


def test_the_first_shapes_can_run_any_step_and_a_single_users_come_next():
    first, others = by_usefulness(SHAPES)
    assert [one.name for one in first] == ["prompt-64-full", "decode-4-full"]
    assert [one.name for one in others[:3]] == ["decode-1-plain", "prompt-16-plain", "decode-4-plain"]
    assert {one.name for one in (*first, *others)} == {one.name for one in SHAPES}
    for one in SHAPES:
        assert smallest_fitting(first, one) in first
        assert smallest_fitting(SHAPES, one) == one
    assert smallest_fitting(SHAPES[1:], shape(64, full=False)) == shape(64)
    assert smallest_fitting([shape(16)], shape(64)) is None


def test_plain_shapes_can_come_first():
    first, others = by_usefulness(SHAPES, plain=True)
    assert [one.name for one in first] == ["prompt-64-plain", "decode-4-plain"]
    assert {one.name for one in (*first, *others)} == {one.name for one in SHAPES}
    only = [one for one in SHAPES if one.full]
    assert by_usefulness(only, plain=True) == by_usefulness(only), "an engine with one sampler has no choice"


@pytest.mark.drawn(0.5)
def test_a_request_waits_for_a_sampler_that_does_not_come_first():
    """The first programs have the plain sampler; the tokens are those of an engine that has all, and none is late."""
    sizes = EngineConfig(
        max_sequences=2, max_batched_tokens=8, max_len=32, page_size=8, pages=20, buckets=(8,), decode_steps=1
    )
    engine = engines.build(sizes, "llama", background=True, plain_first=True)
    assert not any(name.endswith("-full") for name in list(engine.runner.programs)[:2])
    params = [SamplingParams(max_tokens=4, seed=1, top_k=5), SamplingParams(max_tokens=4, seed=2)]
    requests = [engine.submit([3, 4, 5], one) for one in params]
    while any(s.finish is None for r in requests for s in r.sequences):
        engine.step()
    whole = engines.build(sizes, "llama")
    want = [whole.submit([3, 4, 5], one) for one in params]
    while any(s.finish is None for r in want for s in r.sequences):
        whole.step()
    assert [r.sequences[0].tokens for r in requests] == [r.sequences[0].tokens for r in want]
    engine.wait_for_programs()
    assert engine.runner.program_cache is not None
    assert engine.runner.program_cache.counts.late == 0


def test_a_process_ends_after_the_program_that_is_being_compiled():
    """Before any function of ``atexit``: JAX clears in one of them what a compilation reads."""
    script = """
import atexit, time
from dataclasses import dataclass
from jaxllm.infer.runner.program_loader import ProgramLoader

@dataclass(frozen=True)
class Named:
    name: str

def load(program):
    print("begun", program.name, flush=True)
    time.sleep(0.2)
    print("ended", program.name, flush=True)

loader = ProgramLoader([Named(str(n)) for n in range(9)], load, 1)
loader.start()
atexit.register(print, "end")
time.sleep(0.05)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert lines.index("end") == len(lines) - 1
    assert len([one for one in lines if one.startswith("begun")]) < 6, "no further program is begun"
    assert {one.split()[1] for one in lines if one.startswith("begun")} == {
        one.split()[1] for one in lines if one.startswith("ended")
    }


@pytest.mark.drawn(0.5)
def test_a_step_takes_the_smallest_program_that_is_ready(monkeypatch):
    """An engine whose programs arrive one after the other gives the tokens of one that has them all; none is late."""
    sizes = EngineConfig(
        max_sequences=4, max_batched_tokens=16, max_len=64, page_size=8, pages=40, buckets=(4, 16), decode_steps=2
    )
    whole = engines.build(sizes, "llama")
    gate = Gate("prompt-16-full", "decode-4-full", "seat")
    load = type(whole.runner.program_cache)._compile_or_load  # type: ignore[union-attr]
    monkeypatch.setattr(
        type(whole.runner.program_cache), "_compile_or_load", lambda self, p: (gate(p), load(self, p))[1]
    )
    engine = engines.build(sizes, "llama", background=True)
    runner = engine.runner
    assert sorted(runner.programs) == ["decode-4-full", "prompt-16-full", "seat"]
    assert runner.choose(1, 1, decode=True, full=False).name == "decode-4-full"
    assert runner.choose(1, 3, decode=False, full=False).name == "prompt-16-full"
    params = [SamplingParams(max_tokens=9, seed=n, top_k=5 * (n % 2), temperature=0.9) for n in range(4)]
    asked = [{"prompt": [1 + n, 2, 3], "params": one, "at": 2 * n} for n, one in enumerate(params)]
    want = [r.sequences[0].tokens for r in engines.serve(whole, asked)]
    assert [r.sequences[0].tokens for r in engines.serve(engine, asked)] == want
    gate.let("decode-1-plain", "prompt-4-plain")
    assert runner.programs["decode-1-plain"] is not None
    assert runner.choose(1, 1, decode=True, full=False).name == "decode-1-plain"
    assert runner.choose(2, 2, decode=True, full=False).name == "decode-4-full"
    assert [r.sequences[0].tokens for r in engines.serve(engine, asked)] == want
    gate.let(*(one.name for one in runner._shapes))
    engine.wait_for_programs()
    assert runner.programs.complete
    assert runner.choose(2, 2, decode=True, full=False).name == "decode-2-plain"
    assert [r.sequences[0].tokens for r in engines.serve(engine, asked)] == want
    assert runner.program_cache.counts.late == 0


@pytest.mark.drawn(1)
def test_an_engine_that_is_dropped_is_freed():
    """With its weights and programs, each of which has memory maps of its own, of which a process has few."""
    sizes = EngineConfig(
        max_sequences=1, max_batched_tokens=8, max_len=16, page_size=8, pages=4, buckets=(8,), decode_steps=1,
        samplers=("plain",),
    )  # fmt: skip
    engine = engines.build(sizes, "smollm2", "float32")
    held = weakref.ref(engine.runner)
    program = weakref.ref(next(iter(engine.runner.programs.values())))
    del engine
    gc.collect()
    assert held() is None
    gc.collect()  # what its finalizer held until then
    assert program() is None
