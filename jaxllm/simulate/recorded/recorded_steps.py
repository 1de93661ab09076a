"""Recorded steps: a step clock that gives the times of measured steps, program by program.

    jaxllm bench MODEL --record steps.json             # on the machine with the device
    jaxllm simulate MODEL --on h100:1 --steps steps.json

The time of a program's steps is a constant, and so much for each token of context that each forward pass reads; of a
decode loop the constant is for each pass too. What is not computed in a step is not measured in it: the time includes
the host's work as far as the device waits for it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import optimize

from jaxllm.files import read_json, write_json
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.plan.formulas.serving_step import BatchWork, StepCost

LEAST_STEPS = 3
"""Steps of a program from which its time is told."""
CONTEXT_SPREAD = 2.0
"""The longest context of a program's steps over the shortest, from which the time of a token of context is told."""


@dataclass(frozen=True)
class MeasuredStep:
    """Step that was measured.

    Attributes:
        rows: rows of its program.
        decode: it was decode-only.
        passes: forward passes.
        context: tokens that its sequences had, with those of the step, summed over the passes.
        seconds: how long it took.
    """

    rows: int
    decode: bool
    passes: int
    context: float
    seconds: float

    @classmethod
    def of(cls, batches: Sequence[BatchWork], shape: StepShape, passes: int, seconds: float) -> MeasuredStep:
        """A step of these batches; in a decode loop each sequence grows by a token a pass."""
        context = sum(float((one.starts + one.counts + (passes - 1) / 2).sum()) for one in batches)
        return cls(shape.tokens, shape.decode, passes, passes * context, seconds)


@dataclass(frozen=True)
class ProgramTimes:
    """Times of a program's steps: ``fixed + passes * of_pass + context * of_context``.

    Attributes:
        rows, decode: the program.
        fixed, of_pass, of_context: seconds of a step, of a forward pass, and of a token of context.
        steps: steps that they were fitted to.
        error: median error of these.
    """

    rows: int
    decode: bool
    fixed: float
    of_pass: float
    of_context: float
    steps: int
    error: float

    @classmethod
    def fit(cls, steps: Sequence[MeasuredStep]) -> ProgramTimes:
        """Times with the least squares of error relative to themselves, so that means are kept; none is negative."""
        seconds = np.asarray([one.seconds for one in steps])
        # A step with one pass tells a fixed time from that of a pass only beside others with more.
        passes = [one.passes if one.decode else 0 for one in steps]
        contexts = np.asarray([one.context / one.passes for one in steps])
        # Nor do steps of one context tell what more of it would take.
        told = float(contexts.max() >= CONTEXT_SPREAD * contexts.min())
        terms = np.asarray([[1.0, many, told * one.context] for many, one in zip(passes, steps, strict=True)])
        fitted = seconds
        for _ in range(4):  # shares of what was measured would favour steps that were fast by chance
            found, _ = optimize.nnls(terms / fitted[:, None], seconds / fitted)
            fitted = terms @ found
        error = float(np.median(np.abs(terms @ found / seconds - 1)))
        fixed, of_pass, of_context = map(float, found)
        return cls(steps[0].rows, steps[0].decode, fixed, of_pass, of_context, len(steps), error)

    def seconds(self, passes: int, context: float) -> float:
        """Seconds of a step."""
        return self.fixed + self.of_pass * (passes if self.decode else 0) + self.of_context * context


@dataclass(frozen=True)
class RecordedSteps:
    """Step clock of measured steps, see ``jaxllm.simulate.paper_runner.StepClock``.

    Attributes:
        model: what was measured.
        device: kind of device.
        programs: times of each program that was measured, by kind and rows.
        host: seconds of the engine's host for a step, which an engine that has nothing to do cannot hide.
    """

    model: str
    device: str
    programs: tuple[ProgramTimes, ...]
    host: float = 0.0

    @classmethod
    def fit(cls, model: str, device: str, steps: Sequence[MeasuredStep], host: float = 0.0) -> RecordedSteps:
        """Times of the programs of measured steps.

        Raises:
            ValueError: no program ran often enough.
        """
        by_program = defaultdict[tuple[bool, int], list[MeasuredStep]](list)
        for one in steps:
            by_program[one.decode, one.rows].append(one)
        often = [ProgramTimes.fit(by_program[key]) for key in sorted(by_program) if len(by_program[key]) >= LEAST_STEPS]
        if not often:
            raise ValueError(f"recorded steps: none of {len(by_program)} programs ran {LEAST_STEPS} times or more.")
        return cls(model, device, tuple(often), host)

    def __call__(self, batches: list[BatchWork], shape: StepShape, passes: int) -> StepCost:
        """Cost of a step; between two measured programs its rows are interpolated.

        Raises:
            ValueError: there are several replicas, or the program has more rows than any that was measured.
        """
        if len(batches) > 1:
            raise ValueError(f"recorded steps are of one replica, not of {len(batches)}: give a mesh without data.")
        known = [one for one in self.programs if one.decode == shape.decode]
        if not known or shape.tokens > known[-1].rows:
            kind = "decode" if shape.decode else "prompt"
            raise ValueError(
                f"recorded steps: a step has {shape.tokens} rows, and {kind} programs were measured with "
                f"{', '.join(str(one.rows) for one in known) or 'none'}. Record more (jaxllm bench --record, with "
                "larger --batches), or give a smaller --max-sequences or --max-batched-tokens."
            )
        asked = MeasuredStep.of(batches, shape, passes, 0.0)
        seconds = [one.seconds(passes, asked.context) for one in known]
        return StepCost(compute=float(np.interp(shape.tokens, [one.rows for one in known], seconds)))

    def __str__(self) -> str:
        """Table of the programs."""
        lines = [
            f"{self.model} on {self.device}; the host has {1e3 * self.host:.2f} ms of a step",
            f"{'program':>14} {'steps':>6} {'fixed ms':>9} {'ms a pass':>9} {'us a token before':>17} {'error':>6}",
        ]
        for one in self.programs:
            name, context = f"{'decode' if one.decode else 'prompt'} {one.rows}", 1e6 * one.of_context
            times = f"{1e3 * one.fixed:9.2f} {1e3 * one.of_pass:9.2f} {context:17.3f}"
            lines.append(f"{name:>14} {one.steps:6} {times} {one.error:6.1%}")
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Writes them to a JSON file."""
        write_json(path, dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Path) -> RecordedSteps:
        """Steps of a JSON file.

        Raises:
            ValueError: it is not one of ``write``.
        """
        try:
            found = read_json(path)
            programs = tuple(ProgramTimes(**one) for one in found.pop("programs"))
            return cls(programs=programs, **found)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} has no recorded steps: {error}. Write it with `jaxllm bench MODEL --record {path}`."
            ) from error
