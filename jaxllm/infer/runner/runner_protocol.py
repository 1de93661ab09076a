"""Runner protocol: everything that the engine and the server need of the code that runs steps on devices.

``ModelRunner`` runs a model on the devices of one process, ``MultihostRunner`` on those of several; tests have stubs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jax.sharding import Mesh

from jaxllm.infer.runner.adapter_pool import AdapterPool, Page
from jaxllm.infer.runner.paged_cache import LayerGroup
from jaxllm.infer.runner.program_cache import ProgramCache
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.models import Functional


class StepFailedError(RuntimeError):
    """A step could not be computed, and the next one may be: the KV cache is not to be used again, its content is lost.

    The cause is chained.

    Args:
        message: says what failed.
        code: what that is, as servers answer.
    """

    def __init__(self, message: str, code: str = "weights_unavailable"):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class RunnerSpec:
    """Sizes of a runner's batch and KV cache, all settled.

    Attributes:
        groups: groups of layers; each has a page pool.
        pages: number of pages of each pool.
        page_size: positions of a page.
        columns: columns of a page table: pages of the longest sequence.
        max_len: maximum tokens of a sequence.
        vocab: size of the model's vocabulary.
        replicas: data-parallel replicas; each has its own sequences and its own page pools of these sizes.
    """

    groups: tuple[LayerGroup, ...]
    pages: tuple[int, ...]
    page_size: int
    columns: int
    max_len: int
    vocab: int = 0
    replicas: int = 1

    @property
    def tables(self) -> tuple[int, ...]:
        """Layer group of each page table: one for each part of each group."""
        return tuple(i for i, group in enumerate(self.groups) for _ in range(group.parts))


@runtime_checkable
class Runner(Protocol):
    """Runner of an engine: owns the model's weights, its compiled programs and its KV cache."""

    @property
    def spec(self) -> RunnerSpec:
        """Sizes of batch and KV cache."""
        ...

    @property
    def model(self) -> Functional | None:
        """Model that is served; None for a stub."""
        ...

    @property
    def params(self) -> Any:
        """Weights in use; an empty tree for a stub."""
        ...

    @property
    def pools(self) -> Any:
        """Page pools of the KV cache, one per group of layers."""
        ...

    @property
    def mesh(self) -> Mesh | None:
        """Mesh that the model is served on; None for one device."""
        ...

    @property
    def adapter_pool(self) -> AdapterPool | None:
        """Layout of the pool of adapters; None: the engine serves none."""
        ...

    @property
    def token_bytes(self) -> int:
        """Bytes of KV cache per token, in all layers."""
        ...

    @property
    def programs(self) -> Mapping[str, Any]:
        """Compiled programs by name."""
        ...

    @property
    def program_cache(self) -> ProgramCache | None:
        """Cache of the compiled programs, with counts of compilations; None for a stub."""
        ...

    @property
    def follows(self) -> bool:
        """Whether this process only repeats the steps of process 0, and takes no requests itself."""
        ...

    def choose(self, requests: int, tokens: int, *, decode: bool, full: bool) -> StepShape:
        """Shape of the smallest compiled program that a step fits into.

        Args:
            requests: sequences in the step.
            tokens: rows of the step's flat batch.
            decode: every sequence has one row, and no prompt log-probabilities are requested.
            full: the full sampler is needed.
        """
        ...

    def run(self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None = None) -> Any:
        """Starts a step and returns at once; ``np.asarray`` of the result waits for it: int32[B, elements].

        Args:
            shape: program to run.
            packed: int32[B, elements], the step's packed inputs of each replica.
            masks: int32[B, S x rows, U], for the full sampler: bit masks of the tokens that grammars allow, for each
                row whose logits are computed; None: all tokens.
        """
        ...

    def seat(self, replica: int, packed: np.ndarray) -> None:
        """Writes a request's logits-processor state into its slot, see ``logits_processors.slot_buffer``."""
        ...

    def read(self, replica: int, group: int, pages: list[int]) -> Any:
        """Copies pages of a replica's pool to the host, to swap a preempted sequence out."""
        ...

    def write(self, replica: int, group: int, pages: list[int], content: Any) -> None:
        """Copies pages that ``read`` returned back into a replica's pool, to swap a sequence in."""
        ...

    def write_adapter(self, page: int, content: Page) -> None:
        """Writes a page of an adapter into the pool of adapters, on all replicas."""
        ...

    def swap(self, params: Any) -> None:
        """Replaces the weights; nothing is compiled.

        Raises:
            ValueError: structure, shapes or dtypes differ; nothing is changed then.
        """
        ...

    def follow(self, weights: Callable[[], Any] | None = None) -> None:
        """Repeats the steps of process 0 until it closes its runner.

        Args:
            weights: returns this process's shards of the weights that process 0 swaps in; None: they never change.

        Raises:
            RuntimeError: this process does not follow; or process 0 swaps weights and ``weights`` is None.
        """
        ...

    def close(self) -> None:
        """Ends ``follow`` in the other processes; does nothing in an engine of one process."""
        ...
