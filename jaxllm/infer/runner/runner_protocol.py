"""What an engine needs of a device, whatever that is: a model's programs, those of several processes, a stub."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxllm.infer.runner.engine_step import Shape
from jaxllm.infer.runner.paged_cache import LayerGroup


@dataclass(frozen=True)
class Spec:
    """Sizes of an engine, all settled.

    Attributes:
        groups: of layers, each with a pool.
        pages: of each pool.
        page_size: positions of a page.
        columns: pages of the longest sequence.
        max_len: tokens of the longest sequence.
        vocab: tokens of the model's vocabulary.
        replicas: each has so many sequences, and so many pages of each pool, of its own.
    """

    groups: tuple[LayerGroup, ...]
    pages: tuple[int, ...]
    page_size: int
    columns: int
    max_len: int
    vocab: int = 0
    replicas: int = 1


@runtime_checkable
class Runner(Protocol):
    """What an engine needs of a device."""

    @property
    def spec(self) -> Spec:
        """Sizes."""
        ...

    def choose(self, requests: int, tokens: int, *, decode: bool, full: bool) -> Shape:
        """The smallest program that a step fits."""
        ...

    def run(self, shape: Shape, packed: np.ndarray, masks: np.ndarray | None = None) -> Any:
        """Sends a step; ``np.asarray`` of what this gives, numbers of each replica, waits for what the step has made.

        Args:
            packed: int32[B, numbers], of each replica.
            masks: int32[B, S, U] of a full step: bits of the tokens that a row may make; None: all.
        """
        ...

    def seat(self, replica: int, packed: np.ndarray) -> None:
        """Puts what a request asks for into its slot, see ``shaping``."""
        ...

    def read(self, replica: int, group: int, pages: list[int]) -> Any:
        """Pages of a replica's pool, on the host."""
        ...

    def write(self, replica: int, group: int, pages: list[int], content: Any) -> None:
        """Puts pages from the host, as ``read`` gave them, into a replica's pool."""
        ...
