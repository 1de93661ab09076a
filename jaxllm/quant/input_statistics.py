"""Calibration: statistics of the inputs of every matmul of a block, for rows of text that go through the model.

Legend: B rows of text, S sequence, D embed, I inputs of a matmul, E experts, M token rows sorted by expert.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.models import Functional
from jaxllm.models.attention_context import Segments
from jaxllm.models.params import at_least_f32
from pallas_kernels.grouped_matmul import grouped_matmul
from sharding import LogicalAxes


class CalibrationError(ValueError):
    """Text that cannot calibrate; says what is wrong with it and what would do."""


class InputStatistics(NamedTuple):
    """Statistics of the inputs of a matmul; of each expert's, where experts have the matmul.

    Attributes:
        gram: sum of the outer products of the inputs with themselves.
        total: sum of the magnitudes of each input.
        most: largest magnitude of each input.
        low, high: smallest and largest value of each input.
        signed: sum of each input.
        count: number of rows.
    """

    gram: Float[Array, "*E I I"]
    total: Float[Array, "*E I"]
    most: Float[Array, "*E I"]
    low: Float[Array, "*E I"]
    high: Float[Array, "*E I"]
    signed: Float[Array, "*E I"]
    count: Int[Array, "*E"]

    def with_more(self, other: InputStatistics) -> InputStatistics:
        """Statistics of the rows of both."""
        return InputStatistics(
            self.gram + other.gram,
            self.total + other.total,
            jnp.maximum(self.most, other.most),
            jnp.minimum(self.low, other.low),
            jnp.maximum(self.high, other.high),
            self.signed + other.signed,
            self.count + other.count,
        )

    def divided(self, factors: Float[Array, " I"]) -> InputStatistics:
        """Statistics of the inputs over factors."""
        gram = self.gram / factors[:, None] / factors
        total, most, low, high, signed = (x / factors for x in self[1:-1])
        return InputStatistics(gram, total, most, low, high, signed, self.count)

    def shifted(self, by: Float[Array, " I"]) -> InputStatistics:
        """Statistics of the inputs less a shift; the sum of magnitudes is a bound."""
        across = self.signed[:, None] * by
        low, high = self.low - by, self.high - by
        return InputStatistics(
            self.gram - across - across.T + self.count * by[:, None] * by,
            self.total + self.count * jnp.abs(by),
            jnp.maximum(jnp.abs(low), jnp.abs(high)),
            low,
            high,
            self.signed - self.count * by,
            self.count,
        )


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["path", "into"])
@dataclass(frozen=True)
class RecordingWeight:
    """Dense weight that leaves statistics of its inputs in ``into``, a ``jaxllm.models.linear.Weight``."""

    weight: Any
    path: str
    into: dict[str, InputStatistics]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense weight."""
        return self.weight.shape

    def gather(self, dtype: jnp.dtype, axes: LogicalAxes, unreduced_grad: bool) -> RecordingWeight:
        """The weight in compute dtype."""
        return RecordingWeight(self.weight.astype(dtype), self.path, self.into)

    def dense(self, dtype: jnp.dtype) -> Float[Array, "..."]:
        """The dense weight, whose inputs a layer does not show.

        Raises:
            CalibrationError: always.
        """
        raise CalibrationError(f"{self.path} is multiplied in parts, whose inputs cannot be recorded.")

    def project(self, x: Array, out: LogicalAxes, contract: int) -> Array:
        """Matmul that records its input."""
        self.into[self.path] = statistics(x.reshape(-1, int(np.prod(self.shape[:contract]))))
        return sharding.project(x, self.weight, out, contract=contract)

    def grouped_matmul(self, rows: Float[Array, "M A"], sizes: Int[Array, " E"]) -> Float[Array, "M B"]:
        """Grouped matmul that records the rows of every expert."""
        ends = jnp.cumsum(sizes)
        place = jnp.arange(rows.shape[0])

        def of_expert(span: tuple[Array, Array]) -> InputStatistics:
            own = (place >= span[0]) & (place < span[1])
            return statistics(jnp.where(own[:, None], rows, 0))._replace(count=jnp.sum(own))

        self.into[self.path] = jax.lax.map(of_expert, (ends - sizes, ends))
        return grouped_matmul(rows, self.weight, sizes)


def statistics(rows: Float[Array, "M I"]) -> InputStatistics:
    """Statistics of rows."""
    rows = rows.astype(at_least_f32(rows.dtype))
    size = jnp.abs(rows)
    return InputStatistics(
        rows.T @ rows, size.sum(0), size.max(0), rows.min(0), rows.max(0), rows.sum(0), jnp.asarray(rows.shape[0])
    )


def calibration_rows(ids: Sequence[int], rows: int, length: int) -> Int[np.ndarray, "B S"]:
    """Rows of text from its tokens, one after another; as many as there are, at most ``rows``.

    Raises:
        CalibrationError: the text is shorter than one row.
    """
    have = min(rows, len(ids) // length)
    if not have:
        raise CalibrationError(
            f"the calibration text has {len(ids)} tokens, and a row has {length}; give more text or a smaller --length."
        )
    return np.asarray(ids[: have * length], np.int32).reshape(have, length)


class BlockRecorder:
    """Runs one group of blocks of a model on rows of text, with or without recording; compiled once a segment."""

    def __init__(self, model: Functional):
        self.model = model
        self._record = jax.jit(self._run, static_argnums=(0, 4))

    def embed(self, params: Any, tokens: Int[np.ndarray, "B S"]) -> Float[Array, "B S D"]:
        """Inputs of the first block."""
        return jax.jit(self.model.embed)(params, tokens, _positions(tokens))

    def run(
        self, segment: int, params: Any, x: Float[Array, "B S D"], first: int, *, record: bool
    ) -> tuple[Float[Array, "B S D"], dict[str, InputStatistics]]:
        """Outputs of a group of blocks, and statistics of the inputs of its matmuls by path within the group.

        Args:
            segment: number of the segment.
            params: the group's parameters, not stacked.
            x: inputs; a row at a time is held beside them.
            first: number of its first layer.
        """
        outs, found = [], None
        for row in x:
            out, own = self._record(segment, params, row[None], jnp.int32(first), record)
            outs.append(out)
            found = own if found is None else {path: found[path].with_more(own[path]) for path in own}
        return jnp.concatenate(outs), found or {}

    def _run(
        self, segment: int, params: Any, x: Array, first: Array, record: bool
    ) -> tuple[Array, dict[str, InputStatistics]]:
        into: dict[str, InputStatistics] = {}
        if record:
            counts = self.model.contracted()["segments"][str(segment)]
            params = jax.tree.map_with_path(
                lambda path, count, value: RecordingWeight(value, leaf_path(path), into) if count else value,
                counts,
                params,
            )
        out, _ = self.model.group(segment, params, x, _positions(x[..., 0]), first, Segments())
        return out, into


def leaf_path(path: tuple[Any, ...]) -> str:
    """Path of a leaf in a tree, as text."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _positions(tokens: Any) -> Int[Array, "B S"]:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
