"""Rollback and other reactions of the training loop to a loss spike or a non-finite loss.

Spikes are detected on the devices (``jaxllm.train.step.loss_spikes``); here the host reads the step's metrics and
decides.
"""

from __future__ import annotations

import math
from typing import Any

from jaxllm.train.records.recorder import Recorder
from jaxllm.train.recovery.resume import start_state
from jaxllm.train.recovery.saving import Saver
from jaxllm.train.run import Run
from jaxllm.train.step.train_state import TrainState


class NonFiniteLossError(RuntimeError):
    """The loss or the gradients are not finite; the message says at which step and which checkpoint is good."""


class SpikesError(RuntimeError):
    """More loss spikes in a window of steps than ``spikes.limit``; the message lists them."""


class RollbackRequested(Exception):
    """Request to roll back after a loss spike; raised to the caller that holds the run's state.

    Attributes:
        step: of the spike.
        values: its scalar metrics.
    """

    def __init__(self, step: int, values: dict[str, float]):
        super().__init__(f"loss spike at step {step}")
        self.step, self.values = step, values


def check_step_metrics(run: Run, recorder: Recorder, saver: Saver, step: int, values: dict[str, float]) -> None:
    """Checks the metrics of a step that has been logged, and records a loss spike.

    Args:
        step: number of the step, from 1.
        values: its scalar metrics.

    Raises:
        NonFiniteLossError: loss or gradient norm is not finite, and no action of ``spikes`` undoes the step.
        SpikesError: there were too many spikes.
        RollbackRequested: the run is to roll back.
    """
    config, spike = run.config.spikes, values.get("spike", 0.0) > 0
    undone = spike and config.action in ("skip", "rollback")
    if not undone and not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
        raise non_finite_error(values, step, saver)
    if not spike:
        return
    recent = [one["step"] for one in run.spikes if one["step"] > step - config.window]
    if len(recent) >= config.limit:
        raise SpikesError(
            f"step {step}: loss {values['loss']:.4g}, gradient norm {values['grad_norm']:.4g}, a loss spike after "
            f"those of steps {', '.join(map(str, recent))}; {config.limit} in {config.window} steps are "
            "tolerated (spikes.limit). Stopped. Lower optim.schedule.peak, lengthen its warmup, set optim.clip_norm, "
            "or look at the data; then start a new run."
        )
    if config.action == "rollback":
        raise RollbackRequested(step, values)
    record_spike(run, recorder, step, values, {"batch": run.batches.batch_index(step - 1)})
    recorder.view.say(
        f"step {step}: loss spike: loss {values['loss']:.4f}, gradient norm {values['grad_norm']:.2f}; "
        + ("skipped" if config.action == "skip" else f"learning rate now {values['learning_rate']:.2e}")
    )


def record_spike(run: Run, recorder: Recorder, step: int, values: dict[str, float], facts: dict[str, Any]) -> None:
    """Records a loss spike in the event log, and in the run's checkpoints from now on."""
    spike = {"step": step, "action": run.config.spikes.action, **facts}
    run.spikes = [*run.spikes, spike]
    numbers = {name: finite_or_none(values[name]) for name in ("loss", "grad_norm")}
    recorder.events.write("spike", **spike, **numbers)


def roll_back(
    run: Run, recorder: Recorder, saver: Saver, spike: int, values: dict[str, float]
) -> tuple[TrainState, int]:
    """Rolls the run back to before a loss spike; its data then skips the spike's batches.

    The rollback point is ``spikes.back`` steps before the spike, whichever checkpoints exist: from an older checkpoint
    the steps up to that point are repeated as they were. So a run that was stopped in between gives the same result.

    Args:
        spike: step of the spike.
        values: its scalar metrics.

    Returns:
        the restored state, and the step to continue from.
    """
    config, spikes_so_far = run.config.spikes, run.spikes
    to = max(0, spike - 1 - config.back)
    restored = saver.newest(to)
    if restored is None and (restored := saver.oldest()) is not None:
        to = restored  # there is no older checkpoint
    saver.set_aside_after(-1 if restored is None else restored)
    before = run.batches
    batches = before.skip(to, config.pass_over)
    run.data.train.check_steps(batches.batch_index(run.config.steps - 1) + 1)
    state, first = start_state(run, saver)
    run.batches, run.spikes = batches, spikes_so_far
    skipped = [before.batch_index(to), before.batch_index(to + config.pass_over - 1)]
    facts = {"to": to, "from": first, "batches": skipped}
    run.directory.drop_metrics_after(first)
    record_spike(run, recorder, spike, values, facts)
    recorder.view.rewind_to(first)
    recorder.view.say(
        f"step {spike}: loss spike: loss {values['loss']:.4f}, gradient norm {values['grad_norm']:.2f}; rolled back to "
        f"step {first}; {config.pass_over} batches are skipped from step {to} on"
    )
    return state, first


def finite_or_none(value: float) -> float | None:
    """The value, or None if it is not finite: JSON has no NaN or infinity."""
    return value if math.isfinite(value) else None


def non_finite_error(values: dict[str, float], number: int, saver: Saver) -> NonFiniteLossError:
    """Error of step ``number``, whose loss is not finite; sets aside the checkpoint that led to it."""
    saver.wait()
    # The loss of step n is that of the parameters after n - 1 steps, whose own values were finite when saved.
    aside = saver.set_aside_after(number - 2)
    good = saver.latest()
    return NonFiniteLossError(
        f"step {number}: loss {values['loss']}, gradient norm {values['grad_norm']}. Stopped. "
        + (f"The checkpoint of step {good} is good. " if good is not None else "No checkpoint is good. ")
        + (f"That of step {number - 1} leads here and is now {aside[0]}. " if aside else "")
        + "Lower optim.schedule.peak, lengthen its warmup, or set optim.clip_norm; then start a new run."
    )
