"""Roofline of each kind of operation of a model: training, prefill and decode, by formula.

    ops = roofline(config, "decode", batch=64, seq_len=8192, hardware=TABLE["v6e"])

An operation takes the longer of its FLOPs at the peak and its bytes at the memory bandwidth; the longer one is its
bound (LLM-Viewer, arXiv:2402.16363; GenZ, arXiv:2406.01698). Work is divided evenly over the devices; communication is
not included (``jaxllm plan`` includes it). A matmul's bytes are its weights, inputs and outputs; attention keeps its
scores on chip; elementwise operations move the residual stream through memory a few times. For a mixture of experts,
the experts are read that some token is expected to choose. In the backward pass a matmul becomes two of the same size.
Decode is one token a row, with all of ``seq_len`` before it in the KV cache.

Legend: T tokens, D embed, V vocab, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

import jax.numpy as jnp

from jaxllm.infer.runner.paged_cache import layer_groups
from jaxllm.models import BlockConfig, DecoderConfig
from jaxllm.optim.matrix_params import STREAM_AXES
from jaxllm.plan.formulas.device_work import ParameterLeaf, check_remat, leaves_of
from jaxllm.plan.formulas.engine_memory import slot_bytes
from jaxllm.plan.formulas.serving_step import PLAIN, vocabulary_bytes, weight_bytes
from jaxllm.plan.formulas.step_time import ATTENTION_BACKWARD, INNER_PASSES, STREAM_PASSES, UPDATE_BYTES
from jaxllm.plan.hardware import Hardware
from jaxllm.svg import Line, chart, page, stacked_bar
from jaxllm.svg import table as table_of
from jaxllm.train.model_flops import causal_mean

Phase = Literal["training", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("training", "prefill", "decode")


@dataclass(frozen=True)
class OpCost:
    """Cost of one kind of operation, in all layers, on one device.

    Attributes:
        name: name such as ``mlp/up``.
        count: number of layers that have it.
        flops: FLOPs of its matmuls.
        bytes: bytes through the device's memory.
        seconds: time by the roofline.
        bound: what bounds it, "products" (FLOPs) or "memory".
        held: bytes of weights or KV cache that it keeps in the device's memory.
    """

    name: str
    count: int
    flops: float
    bytes: float
    seconds: float
    bound: str
    held: float = 0.0

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else math.inf


def roofline(
    config: DecoderConfig,
    phase: Phase,
    *,
    batch: int,
    seq_len: int,
    hardware: Hardware,
    devices: int = 1,
    weights: str = PLAIN,
    kv_dtype: str = "auto",
) -> list[OpCost]:
    """Roofline of one pass over ``batch`` rows of ``seq_len`` tokens, or one more token of each (decode); operations
    in order.

    Args:
        weights: format of the blocks' matrices in prefill and decode, see ``serving_step.weight_bytes``; with
            ``bfloat16`` they have the compute dtype, as in training.
        kv_dtype: format of the KV cache in decode, as in ``EngineConfig``.

    Raises:
        ValueError: a size is below one, or the phase or a format is unknown or not one of training.
    """
    if phase not in PHASES:
        raise ValueError(f"phase = {phase!r}; legal: {', '.join(PHASES)}.")
    for name, value in (("batch", batch), ("seq_len", seq_len), ("devices", devices)):
        if value < 1:
            raise ValueError(f"{name} = {value}; give a positive number.")
    if phase == "training" and (weights, kv_dtype) != (PLAIN, "auto"):
        raise ValueError(f"weights = {weights!r} and kv_dtype = {kv_dtype!r} are formats of serving, not of training.")
    counted = _OpCounter(config, phase, batch, seq_len, weights, kv_dtype)
    out = []
    for name, row in counted.ops().items():
        flops, moved, held = (value / devices for value in row[1:])
        products, memory = flops / hardware.flops, moved / hardware.bandwidth
        bound = "products" if products >= memory else "memory"
        out.append(OpCost(name, row[0], flops, moved, max(products, memory), bound, held))
    return out


def table(ops: Sequence[OpCost], title: str) -> str:
    """Text table of the operations, with a line of totals."""
    total = sum(op.seconds for op in ops) or 1.0
    head = (
        f"{'':<26}{'layers':>7}{'GFLOP':>13}{'GB':>11}{'FLOP/byte':>11}{'ms':>11}{'share':>8}{'GB held':>9}  bound by"
    )
    lines = [title, head]
    for op in ops:
        lines.append(
            _line(op.name, str(op.count), op.flops, op.bytes, op.intensity, op.seconds, total, op.held) + op.bound
        )
    flops, moved = sum(op.flops for op in ops), sum(op.bytes for op in ops)
    held = sum(op.held for op in ops)
    lines.append(_line("in all", "", flops, moved, flops / max(moved, 1), total, total, held).rstrip())
    return "\n".join(lines)


def _line(
    name: str, count: str, flops: float, moved: float, each: float, seconds: float, total: float, held: float
) -> str:
    numbers = f"{flops / 1e9:>13,.2f}{moved / 1e9:>11,.3f}{each:>11,.1f}{1e3 * seconds:>11,.3f}"
    return f"{name:<26}{count:>7}{numbers}{100 * seconds / total:>7.1f}%{held / 1e9:>9,.2f}  "


def html_report(ops: Sequence[OpCost], title: str, hardware: Hardware) -> str:
    """Roofline as an HTML page: attained FLOP/s of each operation over its arithmetic intensity, and the table."""
    ridge = hardware.flops / hardware.bandwidth
    shown = [op for op in ops if op.flops > 0 and op.bytes > 0]
    low = min([0.1, *(op.intensity for op in shown)])
    high = max([100 * ridge, *(op.intensity for op in shown)])
    # The x axis is linear in the logarithm.
    roof = [low, ridge, high]
    lines = [Line("roof", [math.log10(x) for x in roof], [min(hardware.flops, x * hardware.bandwidth) for x in roof])]
    for number, op in enumerate(shown, 1):
        point = min(hardware.flops, op.intensity * hardware.bandwidth)
        lines.append(Line(op.name, [math.log10(op.intensity)], [point], number, "points"))
    picture = chart(lines, title="roofline", unit="FLOP/s over log10 of FLOP/byte", log=True,
                    marks=[(math.log10(ridge), f"ridge: {ridge:.0f} FLOP/byte")])  # fmt: skip
    total = sum(op.seconds for op in ops) or 1.0
    time = stacked_bar([(op.name, op.seconds, n) for n, op in enumerate(ops)], title="time by operation")
    rows = [
        (op.name, op.count, op.flops / 1e9, op.bytes / 1e9, op.intensity, 1e3 * op.seconds,
         f"{op.seconds / total:.1%}", op.held / 1e9, op.bound)
        for op in ops
    ]  # fmt: skip
    head = ("operation", "layers", "GFLOP", "GB", "FLOP/byte", "ms", "share", "GB held", "bound by")
    body = f'<h1>{escape(title)}</h1><div class="panel">{picture}</div>{time}<div class="panel wide gap">'
    return page(title, body + table_of(rows, head) + "</div>")


class _OpCounter:
    """Counts (layers, FLOPs, bytes, bytes held) of each kind of operation, over all devices."""

    def __init__(
        self, config: DecoderConfig, phase: Phase, batch: int, seq_len: int, weights: str, kv_dtype: str
    ) -> None:
        self.config, self.phase, self.batch, self.seq_len = config, phase, batch, seq_len
        self.tokens = batch if phase == "decode" else batch * seq_len
        self.width = jnp.dtype(config.dtype).itemsize
        self.weight_width = self.width if weights == PLAIN else weight_bytes(weights)
        self.vocabulary_width = vocabulary_bytes(weights, self.width, config.embed_dim)
        self.groups = layer_groups(config, kv_dtype)
        self.train = phase == "training"
        if self.train:
            check_remat(config)
        self.again = self.train and config.remat == "full"

    def ops(self) -> dict[str, tuple[int, float, float, float]]:
        """(layers, FLOPs, bytes, bytes held) by operation, in the order of the model."""
        out: dict[str, tuple[int, float, float, float]] = {}

        def add(name: str, count: int, flops: float, moved: float, held: float = 0.0) -> None:
            before = out.get(name, (0, 0.0, 0.0, 0.0))
            out[name] = (before[0] + count, before[1] + flops, before[2] + moved, before[3] + held)

        d, leaves = self.config.embed_dim, leaves_of(self.config)
        rows = 2 * self.tokens * d * self.width  # read and written
        table = self.config.vocab_size * d * self.vocabulary_width
        add("embedding", 1, 0.0, rows * (3 if self.train else 1), table)
        for leaf in leaves:
            if leaf.matrix and leaf.name.startswith("segments"):
                add(_named(leaf.name), leaf.shape[0], *self._product(leaf), math.prod(leaf.shape) * self.weight_width)
        for block in self.config.blocks:
            held = 0.0 if self.train else self.batch * min(self.seq_len, block.attention.window or self.seq_len)
            add("attention/scores, values", 1, *self._attention(block), held * self._cached_bytes(block))
            add("norms, residuals, gates", 1, 0.0, self._elementwise(block))
        add("head", 1, *self._head(), 0.0 if self.config.tied else table)
        if self.train:
            add("optimizer", 1, 0.0, UPDATE_BYTES * sum(math.prod(leaf.shape) for leaf in leaves))
        return out

    def _product(self, leaf: ParameterLeaf) -> tuple[float, float]:
        layers, *shape = leaf.shape
        axes, tokens, read = leaf.axes[1:], float(self.tokens), 1.0
        if "experts" in axes:
            moe = self._block(leaf).mlp.mixture
            tokens *= moe.top_k / moe.experts  # expected tokens of one expert
            read = 1 - (1 - moe.top_k / moe.experts) ** self.tokens  # expected share of experts that are chosen
        experts = shape[axes.index("experts")] if "experts" in axes else 1
        sides = [n for n, axis in zip(shape, axes, strict=True) if axis != "experts"]
        into = math.prod(sides[:-1]) if axes[-1] in STREAM_AXES else sides[0]
        matrix = math.prod(sides)
        passes = self._passes(last=leaf.name.endswith("/down"))
        flops = 2.0 * tokens * matrix * passes
        weights = matrix * self.weight_width * read * passes
        moved = tokens * (into + matrix // into) * self.width * passes
        return layers * experts * flops, layers * experts * (weights + moved)

    def _passes(self, last: bool) -> int:
        """Number of matmuls of the forward matmul's size: forward, two gradients, and recomputation except of a
        block's last one.
        """
        return (3 + (self.again and not last)) if self.train else 1

    def _attention(self, block: BlockConfig) -> tuple[float, float]:
        attention, cached = block.attention, block.attention.kv_spec
        window = attention.window or self.seq_len
        if self.phase == "decode":
            seen = min(self.seq_len, window)
            dims = attention.attention_macs
            if cached.latent:  # MLA with absorbed projections: queries and outputs are latents
                dims = attention.heads * (cached.key_dim + cached.value_dim)
            flops = 2.0 * self.tokens * dims * seen
            return flops, self.batch * (seen * self._cached_bytes(block) + dims * self.width)
        flops = 2.0 * self.tokens * attention.attention_macs * causal_mean(self.seq_len, attention.window)
        numbers = attention.attention_macs + (0 if cached.latent else cached.elements)
        if cached.latent:
            numbers *= 2  # uncompressed: each head has its own keys and values
        times = 1 + self.again + (ATTENTION_BACKWARD if self.train else 0)
        product_times = 1 + self.again + (2 if self.train else 0)
        return flops * product_times, self.tokens * numbers * self.width * times

    def _cached_bytes(self, block: BlockConfig) -> float:
        """Bytes of a token's KV cache in one such layer."""
        key = block.attention.kv_spec, block.attention.window
        group = next(one for one in self.groups if (one.kv_spec, one.window) == key)
        return slot_bytes(group.kv_spec, group.dtype, 1, "cpu")

    def _elementwise(self, block: BlockConfig) -> float:
        widths = block.mlp.inner_widths(self.config.embed_dim)
        inner = widths["up"] + widths.get("expert", 0)
        forward = STREAM_PASSES * self.config.embed_dim + INNER_PASSES * inner
        times = 2 + (1 + self.again) if self.train else 1
        return float(self.tokens * forward * self.width * times)

    def _head(self) -> tuple[float, float]:
        """(FLOPs, bytes) of the output head: logits of all positions in training, otherwise of one a row."""
        tokens = self.tokens if self.train else self.batch
        d, v = self.config.embed_dim, self.config.vocab_size
        passes = 3 if self.train else 1
        return 2.0 * tokens * d * v * passes, (v * d * self.vocabulary_width + tokens * (d + v) * self.width) * passes

    def _block(self, leaf: ParameterLeaf) -> BlockConfig:
        _, segment, place, *_ = leaf.name.split("/")
        return self.config.segments[int(segment)][0][int(place)]


def _named(name: str) -> str:
    """Operation name of a parameter: ``segments/0/0/mlp/up`` -> ``mlp/up``."""
    return "/".join(name.split("/")[3:])
