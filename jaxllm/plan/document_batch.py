"""Batch of documents of given lengths, for planning: attention work of the busiest device, of any mesh or by need.

Attention computes the pairs of a query and a key of one document; its kernels skip blocks between documents. A
micro-step takes as long as its busiest device. With rows that are split alike, which device that is depends on the
documents of the rows; with context by need (ByteScale, arXiv:2502.21231), on how the host places them
(``jaxllm.data.context_by_need``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Int

from jaxllm.config import ConfigError
from jaxllm.data.context_by_need import ContextSlots
from jaxllm.data.loader import PACKINGS
from jaxllm.models import DecoderConfig
from jaxllm.plan.formulas.device_work import WHOLE, DeviceWork, RingShare, rules_of
from jaxllm.train import RunConfig
from jaxllm.train.model_flops import causal_mean, forward_flops_per_token
from jaxllm.train.run_slots import context_slots
from sharding import MeshSpec

ENOUGH = 1.25
"""Tokens of the drawn documents over those of a batch: packing leaves places empty."""


@dataclass(frozen=True)
class ContextWork:
    """A run whose micro-steps are those of a batch of documents.

    Attributes:
        run: run with as many tokens of a device and micro-steps, all rows split over ``context``.
        pairs: keys of a query on the busiest device of a micro-step, on average over its places, padding included.
        rings: share of the transfers around the whole of ``context`` that take place.
    """

    run: RunConfig
    pairs: float
    rings: RingShare = WHOLE

    def on(self, mesh: MeshSpec) -> DeviceWork:
        """Work of one device of a mesh."""
        return replace(DeviceWork.of(self.run, mesh), pairs=self.pairs, rings=self.rings)


@dataclass(frozen=True)
class DocumentBatch:
    """Documents of one batch, packed in rows as the run packs them.

    Attributes:
        pieces: for each row, the tokens of its documents in order; what is left of the row is padding.
        seq_len: tokens of a row.
    """

    pieces: tuple[tuple[int, ...], ...]
    seq_len: int

    @classmethod
    def drawn(cls, lengths: Sequence[int], run: RunConfig, seed: int = 0) -> DocumentBatch:
        """A batch of a run, of documents that are drawn from so many lengths, with replacement.

        Raises:
            ConfigError: there is no length, or one of less than two tokens.
        """
        if not lengths or min(lengths) < 2:
            raise ConfigError("document lengths: give numbers of tokens, each 2 or more: a token and the next one.")
        data, rng = run.data, np.random.default_rng(seed)
        wanted, drawn = ENOUGH * data.batch_size * data.seq_len, np.empty(0, np.int64)
        while drawn.sum() < wanted:
            drawn = np.append(drawn, rng.choice(np.asarray(lengths, np.int64), max(len(drawn), 64)))
        drawn = drawn[: 1 + int(np.searchsorted(np.cumsum(drawn), wanted))]
        plan = PACKINGS[data.packing](np.zeros(len(drawn), np.int64), drawn, data.seq_len)
        chosen = rng.permutation(plan.rows)[: data.batch_size]
        if len(chosen) < data.batch_size:
            raise ConfigError(f"document lengths: {len(chosen)} rows of {data.seq_len} tokens are too few for a batch.")
        offsets = plan.row_offsets
        rows = (plan.piece_length[offsets[row] : offsets[row + 1]] for row in chosen.tolist())
        return cls(tuple(tuple(row.tolist()) for row in rows), data.seq_len)

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Tokens of each document in the order of the flattened batch; negative for padding."""
        rows = ((*row, *((sum(row) - self.seq_len,) if sum(row) < self.seq_len else ())) for row in self.pieces)
        return [length for row in rows for length in row]

    def pairs_of_parts(self, parts: int) -> Int[np.ndarray, "rows parts"]:
        """Pairs of a query and a key of each of so many equal parts of every row."""
        at = np.arange(parts + 1) * self.seq_len // parts
        found = np.empty((len(self.pieces), parts), np.int64)
        for number, row in enumerate(self.pieces):
            ends = np.cumsum((0, *row))
            whole = np.cumsum([0, *(n * (n + 1) // 2 for n in row)])
            document = np.searchsorted(ends, at, side="right") - 1
            inside = np.where(document < len(row), at - ends[document], 0)
            found[number] = np.diff(whole[document] + inside * (inside + 1) // 2)
        return found

    def model_flops(self, config: DecoderConfig) -> float:
        """Model FLOPs of a training step: of the documents' tokens, and of pairs within documents."""
        tokens = sum(map(sum, self.pieces))
        mean = sum(n * (n + 1) / 2 for row in self.pieces for n in row) / tokens
        whole = self.seq_len
        return tokens * 3 * forward_flops_per_token(config, lambda window: min(mean, causal_mean(whole, window)))

    def work(self, run: RunConfig, mesh: MeshSpec) -> ContextWork:
        """Work of a run on a mesh, by its setting of ``parallel.context``.

        Raises:
            ShardingError: rows are longer than all devices hold.
        """
        sizes, rules = dict(mesh.axes), rules_of(run.parallel)
        ways, devices = math.prod(sizes.get(axis, 1) for axis in rules.mesh_axes("batch")), sizes.get("context", 1)
        if run.parallel.context == "by_need" and devices > 1:
            return self._by_need(run, mesh)
        key = ways, devices, run.accumulate
        if key not in self._static:
            self._static[key] = self._busiest(*key)
        return ContextWork(run, self._static[key])

    @functools.cached_property
    def _static(self) -> dict[tuple[int, int, int], float]:
        return {}

    @functools.cached_property
    def _placed(self) -> dict[ContextSlots, tuple[float, RingShare, int]]:
        return {}

    def _busiest(self, ways: int, devices: int, micro: int) -> float:
        """Keys of a query on the busiest device, where each row is split over so many devices alike."""
        parts = self.pairs_of_parts(2 * devices)
        zigzag = parts[:, :devices] + parts[:, : devices - 1 : -1]  # a part from the front and one from the back
        busiest = zigzag.reshape(ways, -1, micro, devices).sum(axis=1).max(axis=(0, 2))
        return float(busiest.sum()) * ways * devices / (len(self.pieces) * self.seq_len)

    def _by_need(self, run: RunConfig, mesh: MeshSpec) -> ContextWork:
        """Work where each document has as many devices as it needs."""
        slots = context_slots(run, mesh.abstract(), rules_of(run.parallel))
        assert slots is not None
        if slots not in self._placed:
            rings, work = slots.loads(self.lengths)
            ring = np.array(rings)
            share = RingShare(float(((ring - 1) / (slots.devices - 1)).mean()), float((ring > 1).mean()))
            self._placed[slots] = float(work.max(axis=1).mean()) / slots.slot, share, len(rings)
        pairs, share, steps = self._placed[slots]
        data = replace(run.data, seq_len=slots.slot * slots.devices, batch_size=slots.rows * steps)
        parallel = replace(run.parallel, context="ring", slot=0)
        return ContextWork(replace(run, data=data, accumulate=steps, parallel=parallel), pairs, share)


def read_lengths(path: Path) -> tuple[int, ...]:
    """Document lengths of a file: numbers of tokens, separated by spaces or lines.

    Raises:
        ConfigError: the file cannot be read, or has something else in it.
    """
    try:
        return tuple(int(word) for word in path.read_text("utf-8").split())
    except OSError as error:
        raise ConfigError(f"document lengths: cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(
            f"document lengths: {path}: {error}; give whole numbers of tokens, one for each document."
        ) from error
