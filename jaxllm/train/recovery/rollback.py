"""What the loop does about a step whose numbers are none, or a spike (``jaxllm.train.step.loss_spikes``)."""

from __future__ import annotations

import math
from typing import Any

from jaxllm.train.records.recorder import Recorder
from jaxllm.train.recovery.resume import start_state
from jaxllm.train.recovery.saving import Saver
from jaxllm.train.run import Run
from jaxllm.train.step.train_state import TrainState


class NonFiniteLossError(RuntimeError):
    """The loss or the gradients are not finite any more; the message says at which step and what is saved."""


class SpikesError(RuntimeError):
    """More spikes in a window of steps than a run bears; the message says which."""


class RollbackRequested(Exception):
    """A spike that the run goes back from; to be caught by whoever holds its state.

    Attributes:
        step: of the spike.
        values: its metrics.
    """

    def __init__(self, step: int, values: dict[str, float]):
        super().__init__(f"a spike at step {step}")
        self.step, self.values = step, values


def check_step_metrics(run: Run, recorder: Recorder, saver: Saver, step: int, values: dict[str, float]) -> None:
    """What follows from the numbers of step ``step``, which is on record.

    Raises:
        NonFiniteLossError: they are none, and the state is of them.
        SpikesError: there were too many spikes.
        GoBack: the run is to go back.
    """
    config, spike = run.config.spikes, values.get("spike", 0.0) > 0
    borne = spike and config.action in ("skip", "rollback")
    if not borne and not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
        raise non_finite_error(values, step, saver)
    if not spike:
        return
    recent = [one["step"] for one in run.spikes if one["step"] > step - config.window]
    if len(recent) >= config.limit:
        raise SpikesError(
            f"step {step}: loss {values['loss']:.4g}, gradient norm {values['grad_norm']:.4g}, a spike after those of "
            f"steps {', '.join(map(str, recent))}; {config.limit} in {config.window} steps are borne (spikes.limit). "
            "Stopped. Lower optim.schedule.peak, lengthen its warmup, set optim.clip_norm, or look at the data; then "
            "start a new run."
        )
    if config.action == "rollback":
        raise RollbackRequested(step, values)
    record_spike(run, recorder, step, values, {"batch": run.batches.batch_index(step - 1)})
    recorder.view.say(
        f"step {step}: a spike, loss {values['loss']:.4f}, gradient norm {values['grad_norm']:.2f}; "
        + ("skipped" if config.action == "skip" else f"learning rate now {values['learning_rate']:.2e}")
    )


def record_spike(run: Run, recorder: Recorder, step: int, values: dict[str, float], facts: dict[str, Any]) -> None:
    """A spike in the log of events, and in checkpoints from now on."""
    spike = {"step": step, "action": run.config.spikes.action, **facts}
    run.spikes = [*run.spikes, spike]
    numbers = {name: finite_or_none(values[name]) for name in ("loss", "grad_norm")}
    recorder.events.write("spike", **spike, **numbers)


def roll_back(
    run: Run, recorder: Recorder, saver: Saver, spike: int, values: dict[str, float]
) -> tuple[TrainState, int]:
    """The state to go on from, and its step; the run's batches are now those without the spike's.

    The point to go back to is a number of steps before the spike, whichever checkpoints there are: from an older one
    the steps up to it are done again as they were. So a run that was stopped in between makes the same of it.
    """
    config, had = run.config.spikes, run.spikes
    to = max(0, spike - 1 - config.back)
    from_ = saver.newest(to)
    if from_ is None and (from_ := saver.oldest()) is not None:
        to = from_  # nothing is left of the time before
    saver.set_aside_after(-1 if from_ is None else from_)
    before = run.batches
    passing = before.skip(to, config.pass_over)
    run.data.train.check_steps(passing.batch_index(run.config.steps - 1) + 1)
    state, first = start_state(run, saver)
    run.batches, run.spikes = passing, had
    left = {"to": to, "from": first, "batches": [before.batch_index(to), before.batch_index(to + config.pass_over - 1)]}
    run.directory.drop_metrics_after(first)
    record_spike(run, recorder, spike, values, left)
    recorder.view.rewind_to(first)
    recorder.view.say(
        f"step {spike}: a spike, loss {values['loss']:.4f}, gradient norm {values['grad_norm']:.2f}; back to step "
        f"{first}, and from step {to} on without {config.pass_over} batches"
    )
    return state, first


def finite_or_none(value: float) -> float | None:
    """For JSON, which has no other numbers."""
    return value if math.isfinite(value) else None


def non_finite_error(values: dict[str, float], number: int, saver: Saver) -> NonFiniteLossError:
    """The error of step ``number``; sets aside the checkpoint that gave it, so that the newest one is good."""
    saver.wait()
    # The loss of step n is that of the parameters after n - 1 steps, which were finite numbers when they were saved.
    aside = saver.set_aside_after(number - 2)
    good = saver.latest()
    return NonFiniteLossError(
        f"step {number}: loss {values['loss']}, gradient norm {values['grad_norm']}. Stopped. "
        + (f"The checkpoint of step {good} is good. " if good is not None else "No checkpoint is good. ")
        + (f"That of step {number - 1} leads here and is now {aside[0]}. " if aside else "")
        + "Lower optim.schedule.peak, lengthen its warmup, or set optim.clip_norm; then start a new run."
    )
