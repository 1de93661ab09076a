"""Dispatch: chooses the implementation of an operation, and never falls back silently from a named one.

Every public operation takes ``implementation``:

- ``None``: the default order of preference, without the kernels of other platforms, without those of ``ONLY_BY_NAME``,
  and without those whose values differ from the reference's on the device (``pallas_kernels._self_check``). If one does
  not support the arguments, the next one is tried. ``explain`` shows the order.
- a name: only that implementation; it raises ``NotImplementedError`` for arguments it does not support.
- a sequence of names: these implementations, in this order.

An implementation reports unsupported arguments by raising ``NotImplementedError`` with the shape and the limit in the
message. Any other exception propagates.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallas_kernels import _self_check
from pallas_kernels._compat import TargetDevice, manual_on_one_device, target_device

OPERATIONS = {
    "flash_attention": "pallas_kernels.flash_attention.api",
    "linear_cross_entropy": "pallas_kernels.cross_entropy.api",
    "grouped_matmul": "pallas_kernels.grouped_matmul.api",
    "fused_moe": "pallas_kernels.fused_moe.api",
    "grouped_lora": "pallas_kernels.grouped_lora.api",
    "packed_matmul": "pallas_kernels.packed_matmul.api",
    "ternary_matmul": "pallas_kernels.ternary_matmul.api",
    "recurrent": "pallas_kernels.recurrent.api",
    "rms_norm": "pallas_kernels.rms_norm.api",
    "ring_attention": "pallas_kernels.ring_attention.api",
    "paged_attention": "pallas_kernels.paged_attention.api",
}
"""Operation -> module that holds its ``IMPLEMENTATIONS``."""

PLATFORMS: Mapping[str, str] = {
    "pallas_tpu": "tpu",
    "pallas_gpu": "gpu",
    "mosaic_gpu": "gpu",
    "cudnn": "gpu",
    "native": "cpu",
}
"""Implementation made for one platform -> that platform. The others are plain JAX, correct wherever XLA is."""

ONLY_BY_NAME: Mapping[str, str] = {
    "cudnn": "used where it is named: its backward pass is not deterministic",
    "mosaic_gpu": "used where it is named: no device has measured it beside pallas_gpu",
}
"""Implementation that is never a default -> why."""

NEEDS: Mapping[str, str] = {"native": "pallas_kernels.packed_matmul.native"}
"""Implementation that a machine may lack -> module whose ``not_by_default()`` says why, or nothing."""

PREFERRED: Mapping[str, Mapping[str, str]] = {"linear_cross_entropy": {"cpu": "xla"}}
"""Operation -> platform -> implementation that is tried first there, where it differs from the default order."""

Implementation = str | Sequence[str] | None
"""Implementation choice: a name, names in order of preference, or None for the default order."""


def dispatch(
    operation: str, implementations: Mapping[str, Callable[..., Any]], choice: Implementation, /, *args: Any, **kw: Any
) -> Any:
    """Calls the chosen implementation of ``operation`` with the arguments.

    Args:
        operation: name of the operation, for messages.
        implementations: implementations by name, in the default order of preference.
        choice: see the module's docstring.

    Raises:
        ValueError: ``choice`` names no implementation, or is empty.
        NotImplementedError: the named implementation, or every one of several, does not support the arguments.
    """
    if isinstance(choice, str):
        return _named(operation, implementations, choice)(*args, **kw)
    device = target_device()
    names = _order(operation, implementations, device.platform) if choice is None else tuple(choice)
    if not names:
        raise ValueError(f"{operation}: implementation is an empty sequence; choose from {sorted(implementations)}.")
    candidates = {name: _named(operation, implementations, name) for name in names}
    reasons = []
    for name, function in candidates.items():
        if choice is None and (why := _refused(operation, name, device)):
            reasons.append(f"  {name}: {why}")
            continue
        try:
            return function(*args, **kw)
        except NotImplementedError as refusal:
            reasons.append(f"  {name}: {refusal}")
    raise NotImplementedError(f"{operation}: no implementation supports these arguments:\n" + "\n".join(reasons))


def explain(operation: str, *, platform: str | None = None) -> str:
    """Text that says which implementations ``implementation=None`` tries for ``operation`` and why, one implementation
    a line.

    Args:
        operation: name of the operation, such as "flash_attention".
        platform: "tpu", "gpu" or "cpu"; None for the platform that programs are traced for here.

    Raises:
        ValueError: there is no such operation.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"no operation {operation!r}; there are {sorted(OPERATIONS)}.")
    device = target_device() if platform in (None, target_device().platform) else TargetDevice(str(platform), "")
    platform = device.platform
    implementations = importlib.import_module(OPERATIONS[operation]).IMPLEMENTATIONS
    reasons = {name: _reason(operation, name, device) for name in implementations}
    order = [name for name in _order(operation, implementations, platform) if not reasons[name].startswith("not ")]
    lines = [f"{operation} on {platform}: {order[0]}, or the next that supports the arguments"]
    for name in (*order, *(name for name in implementations if name not in order)):
        lines.append(f"  {name}: {reasons[name]}")
    return "\n".join(lines)


def _order(operation: str, implementations: Mapping[str, Callable[..., Any]], platform: str) -> tuple[str, ...]:
    """Implementations for a platform, in order of preference."""
    first = PREFERRED.get(operation, {}).get(platform)
    names = sorted(implementations, key=lambda name: name != first)
    return tuple(name for name in names if PLATFORMS.get(name, platform) == platform and name not in ONLY_BY_NAME)


def may_be_default(operation: str, name: str) -> bool:
    """Whether ``implementation=None`` may choose this kernel for the device that programs are traced for here."""
    device = target_device()
    return PLATFORMS.get(name, device.platform) == device.platform and not _refused(operation, name, device)


def _refused(operation: str, name: str, device: TargetDevice) -> str:
    """Why a kernel is not chosen by default on a device that it is for; empty where it may be."""
    if name in NEEDS and (why := importlib.import_module(NEEDS[name]).not_by_default()):
        return why
    verdict = _verdict(operation, name, device)
    return "" if verdict is None or verdict.passed else str(verdict)


def _verdict(operation: str, name: str, device: TargetDevice) -> _self_check.Verdict | None:
    """Verdict of the self-check; None for plain JAX, and where there is none."""
    return _self_check.may_choose(operation, name, device) if name in PLATFORMS else None


def _reason(operation: str, name: str, device: TargetDevice) -> str:
    if name in ONLY_BY_NAME:
        return ONLY_BY_NAME[name]
    if name not in PLATFORMS:
        return "plain JAX"
    if PLATFORMS[name] != device.platform:
        return f"not for {device.platform}"
    if name in NEEDS and (why := importlib.import_module(NEEDS[name]).not_by_default()):
        return f"not here: it {why}"
    verdict = _verdict(operation, name, device)
    return "compared with float64 in interpret mode, not on a device" if verdict is None else str(verdict)


def _named(operation: str, implementations: Mapping[str, Callable[..., Any]], name: str) -> Callable[..., Any]:
    if name not in implementations:
        raise ValueError(f"{operation}: no implementation {name!r}; there are {sorted(implementations)}.")
    return manual_on_one_device(implementations[name]) if name in PLATFORMS else implementations[name]
