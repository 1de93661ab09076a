"""Decode engine protocol: everything that the prefill pool's process needs of an engine of the decode pool.

``PhaseRunner`` is one in the same process, ``RemoteDecodeEngine`` one in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxllm.infer.runner.program_cache import ProgramCache
from jaxllm.infer.runner.runner_protocol import RunnerSpec
from jaxllm.infer.runner.step.step_shape import StepShape
from pallas_kernels.paged_attention import Slots


@runtime_checkable
class PageArrival(Protocol):
    """Some pages of a layer group on their way to a decode engine."""

    @property
    def nbytes(self) -> int:
        """Bytes of the pages."""
        ...

    @property
    def has_arrived(self) -> bool:
        """Whether the contents are on the decode engine's devices."""
        ...

    def land(self) -> None:
        """Writes the contents into the pages, behind the steps that were started and before others."""
        ...

    def drop(self) -> None:
        """Drops the contents, which nobody needs any more."""
        ...


@runtime_checkable
class DecodeEngine(Protocol):
    """Engine of the decode pool: takes pages of prefill engines, and runs steps."""

    @property
    def spec(self) -> RunnerSpec:
        """Sizes of batch and KV cache."""
        ...

    @property
    def connected(self) -> bool:
        """Whether the engine has a process; one of this process always has."""
        ...

    @property
    def resting(self) -> bool:
        """Whether the engine has had no sequence since ``rest``; one of this process need not be told."""
        ...

    def enter(self) -> bool:
        """Whether the engine takes another sequence; it has one then, until ``rest``."""
        ...

    def rest(self) -> None:
        """Says that the engine has no sequence and no step in flight."""
        ...

    @property
    def program_cache(self) -> ProgramCache | None:
        """Cache of its compiled programs; None in another process."""
        ...

    def choose(self, requests: int, tokens: int, *, decode: bool, full: bool) -> StepShape:
        """Shape of a step, see ``Runner``."""
        ...

    def run(self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None = None) -> Any:
        """Starts a step, see ``Runner``."""
        ...

    def seat(self, replica: int, packed: np.ndarray) -> None:
        """Writes a request's logits-processor state into its slot, see ``Runner``."""
        ...

    def swap(self, params: Any) -> None:
        """Replaces the weights, see ``Runner``.

        Raises:
            ConfigError: the engine is in another process.
        """
        ...

    def receive(self, group: int, pages: list[int], parts: Sequence[Slots]) -> PageArrival:
        """Starts to bring pages of a prefill engine to this engine's devices.

        Args:
            group: their layer group.
            pages: pages of this engine that they are for.
            parts: their contents, as ``PhaseRunner.give`` makes them.
        """
        ...
