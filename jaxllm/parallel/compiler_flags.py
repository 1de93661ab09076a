"""Compiler options by platform, each with what it buys and where that was seen; given with the step, not the process.

As options of one compilation they hold for compiling ahead for a pod as for running there, and two programs of a
process may differ in them; ``XLA_FLAGS`` and ``LIBTPU_INIT_ARGS`` are left to the user.

Measured on compiled text, jax 0.10.2: a scanned two-matrix layer and its gradient, weights gathered over ``fsdp`` or
activations over ``tensor``, on a v6e:2x4 (libtpu 0.0.42.1) and an h100:1x8. "Covered" is a collective that has a matrix
product between its start and its done. These make no difference there, or are what the compiler does by itself, and are
left out: ``xla_gpu_enable_latency_hiding_scheduler`` (on already), ``xla_gpu_threshold_for_windowed_einsum_mib`` (no
collective matmul under explicit axes), ``xla_gpu_*_combine_threshold_bytes``,
``xla_gpu_enable_pipelined_reduce_scatter``, ``xla_gpu_enable_analytical_sol_latency_estimator``,
``xla_gpu_enable_highest_priority_async_stream``; ``xla_gpu_enable_pipelined_all_reduce``, which takes memory and covers
nothing more; ``xla_tpu_enable_latency_hiding_scheduler`` (on already: off, the schedule is another) and
``xla_tpu_enable_sparse_core_collective_offload_*``, which on v6e costs the tensor core 11% more estimated cycles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax

_TPU_SOURCE = (
    "MaxText's flags for v5e, v5p and v6e: github.com/AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py"
)
_GPU_SOURCE = "docs.jax.dev/en/latest/gpu_performance_tips.html"
_TPU = ("TPU v5 lite", "TPU v5", "TPU v6 lite")
_FUSED = "with the other async options, v6e FSDP: 2 loops' all-gathers run inside matrix products (none do without)"


@dataclass(frozen=True)
class Flag:
    """One compiler option.

    Attributes:
        name: without dashes.
        value: that is set; the GPU compiler spells "True", the TPU compiler "true".
        platform: ``"tpu"`` or ``"gpu"``.
        kinds: device kinds that it is for, as ``jax.Device.device_kind`` names them; empty: all of the platform.
        buys: what it is for.
        measured: what it did to a compiled program.
        source: who recommends it.
        known_before: the first version of jax whose compiler has not got it any more, as far as was seen; None: all.
    """

    name: str
    value: str
    platform: str
    kinds: tuple[str, ...]
    buys: str
    measured: str
    source: str
    known_before: tuple[int, int] | None = None

    @property
    def is_known(self) -> bool:
        """Whether the compiler of the jax that is here takes it; an unknown option is an error there."""
        return self.known_before is None or jax.__version_info__[:2] < self.known_before


FLAGS = (
    Flag(
        "xla_enable_async_all_gather",
        "true",
        "tpu",
        _TPU,
        "an all-gather is a start and a done, with other work between them",
        _FUSED,
        _TPU_SOURCE,
    ),
    Flag(
        "xla_tpu_enable_async_collective_fusion",
        "true",
        "tpu",
        _TPU,
        "a collective is split into steps that are fused into the compute they run beside",
        _FUSED,
        _TPU_SOURCE,
    ),
    Flag(
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "true",
        "tpu",
        _TPU,
        "the same for all-gathers: those of FSDP",
        _FUSED,
        _TPU_SOURCE,
    ),
    Flag(
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        "true",
        "tpu",
        _TPU,
        "one collective may run beside several operations",
        _FUSED,
        _TPU_SOURCE,
    ),
    Flag(
        "xla_tpu_overlap_compute_collective_tc",
        "true",
        "tpu",
        _TPU,
        "the tensor core computes while a collective is under way",
        _FUSED,
        _TPU_SOURCE,
    ),
    Flag(
        "xla_gpu_enable_while_loop_double_buffering",
        "True",
        "gpu",
        (),
        "two layers in a turn of the scan: the second's weights are gathered while the first computes",
        "h100 FSDP: covered 4 of 9 in two turns (1 of 3 in one without); 4% more temporary memory",
        _GPU_SOURCE,
    ),
    Flag(
        "xla_gpu_enable_pipelined_all_gather",
        "True",
        "gpu",
        (),
        "an all-gather is moved to the turn of the loop before",
        "h100 FSDP: covered 2 of 4 (1 of 3 without); with double buffering 5 of 9",
        _GPU_SOURCE,
        known_before=(0, 11),
    ),
)
"""All options. Removing one needs a measurement, as adding one does."""


def options(platform: str, device_kind: str, changes: Iterable[str] = ()) -> dict[str, str]:
    """The compiler options for a kind of device.

    Args:
        platform: ``jax.Device.platform``.
        device_kind: ``jax.Device.device_kind``.
        changes: ``NAME=VALUE`` sets an option, of the table or another; ``NAME=`` leaves it to the compiler.

    Raises:
        ValueError: a change is not of that form.
    """
    chosen = {
        flag.name: flag.value
        for flag in FLAGS
        if flag.is_known and flag.platform == platform and (not flag.kinds or device_kind in flag.kinds)
    }
    for change in changes:
        name, equals, value = change.strip().lstrip("-").partition("=")
        if not name or not equals:
            raise ValueError(f"compiler_options: {change!r} is not NAME=VALUE, or NAME= to leave NAME to the compiler.")
        chosen.pop(name, None)
        if value:
            chosen[name] = value
    return chosen


def described(chosen: Mapping[str, str]) -> str:
    """One line for a log."""
    return ", ".join(f"{name}={value}" for name, value in chosen.items()) or "the compiler's own"
