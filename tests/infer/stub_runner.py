"""Stub of the whole Runner protocol, for tests that override what they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxllm.infer.runner.runner_protocol import RunnerSpec
from jaxllm.infer.runner.step.step_shape import StepShape


class StubRunner:
    """Refuses by name what a stub does not override."""

    model = params = mesh = program_cache = adapter_pool = None
    pools: Any = ()
    token_bytes = 0
    follows = False

    def __init__(self, spec: RunnerSpec):
        self.spec = spec
        self.programs: Mapping[str, Any] = {}

    def choose(self, requests: int, tokens: int, *, decode: bool, full: bool) -> StepShape:
        raise NotImplementedError("the stub has no programs")

    def run(self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None = None) -> Any:
        raise NotImplementedError("the stub runs no steps")

    def seat(self, replica: int, packed: np.ndarray) -> None:
        raise NotImplementedError("the stub has no logits processors")

    def read(self, replica: int, group: int, pages: list[int]) -> Any:
        raise NotImplementedError("the stub has no pages")

    def write(self, replica: int, group: int, pages: list[int], content: Any) -> None:
        raise NotImplementedError("the stub has no pages")

    def write_adapter(self, page: int, content: Any) -> None:
        raise NotImplementedError("the stub has no adapters")

    def swap(self, params: Any) -> None:
        raise ValueError("only an engine of a real model has weights.")

    def follow(self, weights: Callable[[], Any] | None = None) -> None:
        raise RuntimeError("the stub follows nobody")

    def close(self) -> None:
        """Nobody follows."""
