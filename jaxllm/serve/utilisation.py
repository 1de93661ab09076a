"""Utilisation of an engine by compiled program: model FLOPs and bytes, as shares of the device's peaks (MFU, MBU).

A forward pass reads all weights except looked-up embeddings, and the keys and values that its sequences attend to; it
writes the keys and values of its tokens. In a mixture of experts the weights read depend on the tokens: no bytes then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jaxllm.compiler.device_peaks import Peak, peak_of
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.engine.engine_metrics import ProgramMetrics
from jaxllm.infer.pools.pooled_runner import PooledRunner
from jaxllm.infer.runner.runner_protocol import Runner
from jaxllm.models import DecoderConfig
from jaxllm.train.model_flops import forward_flops_per_token


@dataclass(frozen=True)
class ProgramUtilisation:
    """Work and utilisation of all steps of one compiled program.

    Attributes:
        seconds: total time of the steps.
        flops: model FLOPs, see ``forward_flops_per_token``; the output head counts for generated tokens only.
        moved: bytes read and written; None if unknown.
        mfu, mbu: model FLOPs and bytes as shares of the devices' peaks, 0 to 1; None if unknown.
    """

    seconds: float
    flops: float
    moved: float | None
    mfu: float | None = None
    mbu: float | None = None


def program_utilisation(engine: Engine) -> dict[str, ProgramUtilisation]:
    """Utilisation by the program's name; empty for an engine without a model."""
    import jax

    runner = engine.runner
    if runner.model is None:
        return {}
    config, out = runner.model.config, {}
    for name, program in list(engine.metrics.programs.items()):
        if program.seconds > 0 and program.tokens:
            one = runner.runner_of(name) if isinstance(runner, PooledRunner) else runner
            if one is None:
                continue  # its devices are of a decode process
            weights, cached = weight_bytes(config, one.params), cached_bytes(one)
            devices = jax.tree.leaves(one.params)[0].sharding.device_set
            peak, many = peak_of(next(iter(devices)).device_kind), len(devices)
            flops = model_flops(config, program)
            moved = None if weights is None else program.passes * weights + cache_bytes(cached, program)
            out[name] = ProgramUtilisation(
                program.seconds, flops, moved, *_shares(peak, many, program.seconds, flops, moved)
            )
    return out


def _shares(
    peak: Peak | None, devices: int, seconds: float, flops: float, moved: float | None
) -> tuple[float | None, float | None]:
    if peak is None:
        return None, None
    most = seconds * devices
    return flops / (most * peak.flops), None if moved is None else moved / (most * peak.bandwidth)


def model_flops(config: DecoderConfig, program: ProgramMetrics) -> float:
    """Model FLOPs of all tokens of a program; the output head's for generated tokens only."""
    each = forward_flops_per_token(config, lambda window: program.attended.get(window, 0) / program.tokens)
    return each * program.tokens - 2.0 * config.embed_dim * config.vocab_size * (program.tokens - program.samples)


def weight_bytes(config: DecoderConfig, params: Any) -> float | None:
    """Bytes of weights that a forward pass reads, on all devices together; None for a mixture of experts."""
    import jax

    if config.mixtures:
        return None
    total = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        looked_up = path[0].key == "embedding" and not (config.tied and path[1].key == "table")
        if not looked_up:
            each = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            total += each * len(leaf.sharding.device_set)
    return float(total)


def cached_bytes(runner: Runner) -> dict[int | None, float]:
    """Bytes of keys and values per position, in all layers of an attention window (None: full attention)."""
    out: dict[int | None, float] = {}
    groups = runner.spec.groups
    for number, pool in enumerate(runner.pools):
        group = groups[number % len(groups)]  # each pipeline stage has pools of all
        positions = pool.data.shape[1] * pool.data.shape[3]
        bytes_ = sum(math.prod(x.shape) * x.dtype.itemsize for x in pool if x is not None)
        out[group.window] = out.get(group.window, 0.0) + group.parts * bytes_ / positions
    return out


def cache_bytes(cached: dict[int | None, float], program: ProgramMetrics) -> float:
    """Bytes of keys and values that the steps of a program read and wrote."""
    return sum(each * (program.read.get(window, 0) + program.tokens) for window, each in cached.items())
