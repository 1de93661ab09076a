"""Proof harness: registers proofs and runs one unit: a seeded trial, a listed case, or a chunk of drawn examples."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib
import random
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis.strategies import SearchStrategy

from tests import environment

Errors = dict[str, float]
"""Measure -> error. A trial that returns one float has the measure `error`."""

_HERE = Path(__file__).resolve().parent
_proofs: dict[tuple[str, str], Proof] = {}


class ProofError(Exception):
    """A proof is registered wrongly, or its strategy cannot give what was asked."""


@dataclasses.dataclass(frozen=True)
class Proof:
    """One claim. See `proof` for the fields."""

    issue: str
    name: str
    trial: Callable[[Any], float | Mapping[str, float] | None]
    count: int
    sample: int
    bounds: Errors
    strategy: SearchStrategy | None
    chunk: int
    float64: bool
    parallel: bool
    cases: tuple[Any, ...] | None = None
    counts: tuple[str, ...] = ()
    quick: tuple[int, ...] = ()
    """Indices of the listed cases that a test run takes some of; empty: of all."""

    @property
    def module(self) -> str:
        """Dotted name of the trial's module, where `covered_code` begins."""
        trial = self.trial
        while isinstance(trial, functools.partial):
            trial = trial.func
        return trial.__module__

    @property
    def kind(self) -> str:
        """Kind of the units that are counted."""
        return "cases" if self.cases is not None else "seeds" if self.strategy is None else "examples"

    def sampled(self, seed: int) -> list[int]:
        """Units of a test run: of listed cases others with every seed, of drawn examples one chunk."""
        if self.cases is not None:
            shuffled = random.Random(environment.derive(seed, self.issue, self.name))
            return shuffled.sample(self.quick or range(self.count), self.sample)
        return list(range(self.sample)) if self.strategy is None else [0]

    def labels(self) -> list[str]:
        """Labels of listed cases, as the record names them."""
        return [" / ".join(map(str, c)) if isinstance(c, tuple) else str(c) for c in self.cases or ()]


@dataclasses.dataclass(frozen=True)
class Unit:
    """Unit of a proof: trial number `index` of a seeded one, a case of a listed one, or a chunk of a drawn one."""

    case: str
    index: int
    run: int
    """Trials executed; of a chunk, only examples not seen before."""
    worst: Errors
    seconds: float
    seen: tuple[str, ...] = ()
    """Digests of the examples of a chunk."""
    counts: Errors = dataclasses.field(default_factory=dict)
    """Sums of what the trials counted."""
    failure: str | None = None
    """Traceback, with the shrunk example of a drawn proof; None if all passed."""


def proof(
    issue: str,
    *,
    count: int | None = None,
    sample: int,
    name: str | None = None,
    bound: float | Mapping[str, float] | None = None,
    strategy: SearchStrategy | None = None,
    cases: Sequence[Any] | None = None,
    chunk: int = 20,
    float64: bool = False,
    parallel: bool = True,
    counts: Sequence[str] = (),
    quick: Sequence[Any] = (),
):
    """Registers a trial as a proof of an issue.

    The trial asserts; a seeded one takes a 32-bit `seed`, a drawn one the example, a listed one the case. It may return
    its error, or several by name: the largest are kept and must not exceed their bounds (NaN does).

    Args:
        issue: the proof's group, `make proof ISSUE`; the folder it lives in.
        count: trials of the full run: seeds, or distinct examples; of listed cases it is their number.
        sample: trials of it in a test run that samples it; `sampling` says which it samples. 0: none, since it compares
            seconds, which mean nothing beside other tests.
        name: default: the function's name.
        bound: largest legal error, one for all or by name. None: the trial returns no error.
        strategy: draws examples; None: the trial takes a seed, or a case.
        cases: the full run takes each once, in this order, and the record has each one's errors; a test run takes
            some, by its seed.
        chunk: examples of one resumable step of a drawn proof.
        float64: JAX is in 64-bit mode during the trial.
        parallel: False if nothing else may run on the machine meanwhile.
        counts: names of what a trial counts and returns beside its errors; the record has their sums.
        quick: of `cases`, those that are short enough for a test run; none given: all.
    """

    def register(trial):
        case = name or trial.__name__
        if (issue, case) in _proofs and _proofs[issue, case].trial.__module__ != trial.__module__:
            raise ProofError(f"proof {issue}/{case} is registered twice.")
        if (cases is None) == (count is None) or (cases is not None and strategy is not None):
            raise ProofError(f"proof {issue}/{case}: give a count, with or without a strategy, or give cases.")
        number = len(cases) if cases is not None else count or 0
        if not 0 <= sample <= number or number < 1 or chunk < 1:
            raise ProofError(f"proof {issue}/{case}: need 0 <= sample <= count, count >= 1 and chunk >= 1.")
        bounds = dict(bound) if isinstance(bound, Mapping) else {} if bound is None else {"error": float(bound)}
        listed = None if cases is None else tuple(cases)
        if strange := [one for one in quick if one not in (listed or ())]:
            raise ProofError(f"proof {issue}/{case}: {strange} are quick, but no cases of it.")
        short = tuple((listed or ()).index(one) for one in quick)
        if quick and sample > len(short):
            raise ProofError(f"proof {issue}/{case}: {sample} of {len(short)} quick cases cannot be sampled.")
        made = Proof(
            issue, case, trial, number, sample, bounds, strategy, chunk, float64, parallel, listed, tuple(counts), short
        )
        if len(set(made.labels())) < len(listed or ()):
            raise ProofError(f"proof {issue}/{case}: two cases have the same name.")
        _proofs[issue, case] = made
        return trial

    return register


def issues() -> list[str]:
    """Groups that have proofs."""
    return sorted(p.name for p in _HERE.iterdir() if p.is_dir() and any(p.glob("[a-z]*.py")))


def load(issue: str) -> dict[str, Proof]:
    """Imports `tests/proofs/<issue>/*.py` and returns its proofs by name.

    Raises:
        ProofError: there is no such group.
    """
    if issue not in issues():
        close = difflib.get_close_matches(issue, issues(), n=1)
        raise ProofError(f"no proofs named {issue!r}: there are {', '.join(close or issues())}.")
    for file in sorted((_HERE / issue).glob("[a-z]*.py")):
        importlib.import_module(f"tests.proofs.{issue}.{file.stem}")
    return {case: found for (group, case), found in sorted(_proofs.items()) if group == issue}


def run_unit(proof: Proof, seed: int, index: int, *, examples: int | None = None, seen: Collection[str] = ()) -> Unit:
    """Runs trial, case or chunk number `index` of a proof; a failure is in the result, not raised.

    Args:
        seed: the run's seed; each unit derives its own from it.
        examples: of a drawn proof, instead of `proof.chunk`.
        seen: digests of examples that need no second run.
    """
    started = time.monotonic()
    own_seed = environment.derive(seed, proof.issue, proof.name, index)
    log = _Log(proof, set(seen))
    failure = None
    try:
        with warnings.catch_warnings(), environment.x64(proof.float64):
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", environment.TYPECHECK_RANDOM)
            if proof.cases is not None:
                log.trial(proof.cases[index])
            elif proof.strategy is None:
                log.trial(own_seed)
            else:
                _draw(proof.strategy, log, own_seed, examples or proof.chunk)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a trial's assertion, and whatever Hypothesis makes of it
        failure = traceback.format_exc()
    spent = time.monotonic() - started
    return Unit(proof.name, index, log.run, log.worst, spent, tuple(log.new), log.counts, failure)


def merge(worst: Errors, errors: Mapping[str, float]) -> Errors:
    """The larger of each measure's errors."""
    return {name: max(e for e in (worst.get(name), errors.get(name)) if e is not None) for name in {**worst, **errors}}


def add(counts: Errors, more: Mapping[str, float]) -> Errors:
    """Sums of what was counted."""
    return {name: counts.get(name, 0.0) + more.get(name, 0.0) for name in {**counts, **more}}


class _Log:
    """Runs trials, keeps count and the worst errors."""

    def __init__(self, proof: Proof, seen: set[str]):
        self.proof, self.seen = proof, seen
        self.run = 0
        self.worst: Errors = {}
        self.counts: Errors = {}
        self.new: list[str] = []

    def trial(self, argument: Any) -> None:
        result = self.proof.trial(argument)
        errors = {} if result is None else dict(result) if isinstance(result, Mapping) else {"error": float(result)}
        errors = {name: float(error) for name, error in errors.items()}
        if missing := set(self.proof.counts) - set(errors):
            raise ProofError(f"the trial does not return its counts {sorted(missing)}.")
        counted = {name: errors.pop(name) for name in self.proof.counts}
        if set(errors) != set(self.proof.bounds):
            raise ProofError(f"the trial returns errors {sorted(errors)}, its bounds are {sorted(self.proof.bounds)}.")
        for name, error in errors.items():
            bound = self.proof.bounds[name]
            assert error <= bound, f"{name}: {error:.3g} exceeds its bound {bound:.3g}"
        self.worst = merge(self.worst, errors)
        self.counts = add(self.counts, counted)
        self.run += 1

    def example(self, example: Any) -> None:
        digest = hashlib.sha256(repr(example).encode()).hexdigest()[:16]
        if digest in self.seen:
            return
        self.trial(example)
        self.seen.add(digest)
        self.new.append(digest)


def _draw(strategy: SearchStrategy, log: _Log, seed: int, examples: int) -> None:
    """One Hypothesis run; it shrinks what fails."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        print_blob=False,
    )
    @hypothesis.given(strategy)
    def check(example):
        # Printed with the failure also where a library has replaced Hypothesis's own printer, as schemathesis does.
        hypothesis.note(f"example={example!r}")
        log.example(example)

    check()
