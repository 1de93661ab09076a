"""XLA compiler flags by platform, each with its purpose, its measured effect and its source.

They are options of one compilation, not of the process: ahead-of-time compilation for a pod uses the same ones, and two
programs of a process may differ in them. ``XLA_FLAGS`` and ``LIBTPU_INIT_ARGS`` are left to the user.

Measured on compiled programs, jax 0.10.2: a scanned two-matrix layer and its gradient, weights gathered over ``fsdp``
or activations over ``tensor``, on a v6e:2x4 (libtpu 0.0.42.1) and an h100:1x8. A "covered" collective has a matmul
between its start and its done. These flags make no difference there, or are on by default, and are left out:
``xla_gpu_enable_latency_hiding_scheduler`` (on already), ``xla_gpu_threshold_for_windowed_einsum_mib`` (no collective
matmul under explicit axes), ``xla_gpu_*_combine_threshold_bytes``, ``xla_gpu_enable_pipelined_reduce_scatter``,
``xla_gpu_enable_analytical_sol_latency_estimator``, ``xla_gpu_enable_highest_priority_async_stream``;
``xla_gpu_enable_pipelined_all_reduce``, which takes memory and covers nothing more;
``xla_tpu_enable_latency_hiding_scheduler`` (on already: off, the schedule is another) and
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
_FUSED = "with the other async options, v6e FSDP: all-gathers of 2 loops run inside matmuls (none do without)"


@dataclass(frozen=True)
class Flag:
    """Compiler flag.

    Attributes:
        name: name without dashes.
        value: value to set; the GPU compiler spells "True", the TPU compiler "true".
        platform: ``"tpu"`` or ``"gpu"``.
        kinds: device kinds that it is for, as in ``jax.Device.device_kind``; empty for all of the platform.
        buys: purpose.
        measured: effect on a compiled program.
        source: where it is recommended.
        before: first JAX version whose compiler no longer has it, or refuses programs with it; None if all take it.
        still: device kinds for which that compiler takes it all the same.
    """

    name: str
    value: str
    platform: str
    kinds: tuple[str, ...]
    buys: str
    measured: str
    source: str
    before: tuple[int, int] | None = None
    still: tuple[str, ...] = ()

    def is_taken(self, platform: str, device_kind: str) -> bool:
        """Whether the installed JAX's compiler for a kind of device takes the flag; with another one it would fail."""
        if platform != self.platform or (self.kinds and device_kind not in self.kinds):
            return False
        return self.before is None or jax.__version_info__[:2] < self.before or device_kind in self.still


FLAGS = (
    Flag(
        "xla_enable_async_all_gather",
        "true",
        "tpu",
        _TPU,
        "splits an all-gather into a start and a done, with other work between them",
        _FUSED,
        _TPU_SOURCE,
    ),
    Flag(
        "xla_tpu_enable_async_collective_fusion",
        "true",
        "tpu",
        _TPU,
        "splits a collective into steps that are fused with the compute beside them",
        _FUSED,
        _TPU_SOURCE,
    ),
    Flag(
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "true",
        "tpu",
        _TPU,
        "the same for the all-gathers of FSDP",
        f"{_FUSED}; with xla_enable_async_all_gather the compiler of jax 0.12 refuses it except for v5e, as unsafe",
        _TPU_SOURCE,
        before=(0, 11),
        still=("TPU v5 lite",),
    ),
    Flag(
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        "true",
        "tpu",
        _TPU,
        "lets one collective run beside several operations",
        _FUSED,
        _TPU_SOURCE,
    ),
    Flag(
        "xla_tpu_overlap_compute_collective_tc",
        "true",
        "tpu",
        _TPU,
        "lets the tensor core compute while a collective is in flight",
        _FUSED,
        _TPU_SOURCE,
    ),
    Flag(
        "xla_disable_hlo_passes",
        "while-loop-all-reduce-code-motion",
        "tpu",
        ("TPU7x",),
        "mixtures in micro-batches compile: the pass fails at their sums (RET_CHECK, user->opcode() == kAdd)",
        "Mixtral 8x22B, fsdp=32,expert=2,tensor=4 in four micro-batches: refused with it by libtpu 0.0.42.1; "
        "Llama 3 8B, fsdp=16,tensor=4 in two: without it 16% less memory, 0.2% fewer cycles",
        "the pass: github.com/openxla/xla, xla/service/while_loop_all_reduce_code_motion.cc",
    ),
    Flag(
        "xla_gpu_enable_while_loop_double_buffering",
        "True",
        "gpu",
        (),
        "two layers per iteration of the scan: the second's weights are gathered while the first computes",
        "h100 FSDP: covered 4 of 9 in two iterations (1 of 3 in one without); 4% more temporary memory",
        _GPU_SOURCE,
    ),
    Flag(
        "xla_gpu_enable_pipelined_all_gather",
        "True",
        "gpu",
        (),
        "moves an all-gather to the iteration before",
        "h100 FSDP: covered 2 of 4 (1 of 3 without); with double buffering 5 of 9",
        _GPU_SOURCE,
        before=(0, 11),
    ),
)
"""All flags. Removing one needs a measurement, as adding one does."""


def options(platform: str, device_kind: str, changes: Iterable[str] = ()) -> dict[str, str]:
    """Compiler options for a kind of device.

    Args:
        platform: ``jax.Device.platform``.
        device_kind: ``jax.Device.device_kind``.
        changes: ``NAME=VALUE`` sets an option, in ``FLAGS`` or not; ``NAME=`` leaves it to the compiler.

    Raises:
        ValueError: a change does not have that form.
    """
    chosen = {flag.name: flag.value for flag in FLAGS if flag.is_taken(platform, device_kind)}
    for change in changes:
        name, equals, value = change.strip().lstrip("-").partition("=")
        if not name or not equals:
            raise ValueError(f"compiler_options: {change!r} is not NAME=VALUE, or NAME= to leave NAME to the compiler.")
        chosen.pop(name, None)
        if value:
            chosen[name] = value
    return chosen


def described(chosen: Mapping[str, str]) -> str:
    """Compiler options as one line for a log."""
    return ", ".join(f"{name}={value}" for name, value in chosen.items()) or "the compiler's own"
