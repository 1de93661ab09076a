"""Recorded steps: times of an engine's steps that were measured, for the simulator in place of a step-time model."""

from __future__ import annotations

from jaxllm.simulate.recorded.recorded_steps import RecordedSteps as RecordedSteps
from jaxllm.simulate.recorded.step_recorder import StepRecorder as StepRecorder
from jaxllm.simulate.recorded.step_recorder import record_steps as record_steps
