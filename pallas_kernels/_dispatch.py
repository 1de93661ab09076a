"""Dispatch: chooses the implementation of an operation, and never falls back silently from a named one.

Every public operation takes ``implementation``:

- ``None``: the default order of preference, without the implementations whose values were never verified on the
  platform (``VERIFIED``). If one does not support the arguments, the next one is tried. ``explain`` shows the order.
- a name: only that implementation; it raises ``NotImplementedError`` for arguments it does not support.
- a sequence of names: these implementations, in this order.

An implementation reports unsupported arguments by raising ``NotImplementedError`` with the shape and the limit in the
message. Any other exception propagates.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallas_kernels._compat import target_device

OPERATIONS = {
    "flash_attention": "pallas_kernels.flash_attention.api",
    "linear_cross_entropy": "pallas_kernels.cross_entropy.api",
    "grouped_matmul": "pallas_kernels.grouped_matmul.api",
    "rms_norm": "pallas_kernels.rms_norm.api",
    "ring_attention": "pallas_kernels.ring_attention.api",
    "paged_attention": "pallas_kernels.paged_attention.api",
}
"""Operation -> module that holds its ``IMPLEMENTATIONS``."""

VERIFIED: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "flash_attention": {
        "pallas_tpu": {"tpu": "verified in interpret mode, not on a TPU"},
        "pallas_gpu": {},
    },
    "ring_attention": {
        "pallas_tpu": {"tpu": "verified in interpret mode on eight simulated devices, not on a TPU"},
    },
    "paged_attention": {
        "pallas_tpu": {"tpu": "verified in interpret mode, not on a TPU"},
        "pallas_gpu": {},
    },
    "linear_cross_entropy": {
        "pallas_tpu": {"tpu": "verified in interpret mode, not on a TPU"},
        "pallas_gpu": {},
    },
    "grouped_matmul": {
        "pallas_tpu": {"tpu": "verified in interpret mode, not on a TPU"},
        "pallas_gpu": {},
    },
}
"""Operation -> platform-specific implementation -> platform on which its values were compared with the reference ->
method of the comparison. An implementation that is not listed is plain JAX and is correct wherever XLA is. A listed
implementation without an entry for a platform is compile-only there: ``None`` never chooses it.
"""

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
    names = _eligible(operation, implementations, target_device().platform) if choice is None else tuple(choice)
    if not names:
        raise ValueError(f"{operation}: implementation is an empty sequence; choose from {sorted(implementations)}.")
    candidates = {name: _named(operation, implementations, name) for name in names}
    reasons = []
    for name, function in candidates.items():
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
    platform = platform or target_device().platform
    implementations = importlib.import_module(OPERATIONS[operation]).IMPLEMENTATIONS
    order = _eligible(operation, implementations, platform)
    lines = [f"{operation} on {platform}: {order[0]}, or the next that supports the arguments"]
    for name in (*order, *(name for name in implementations if name not in order)):
        how = VERIFIED.get(operation, {}).get(name)
        reason = (
            "plain JAX"
            if how is None
            else how.get(platform, f"not verified on {platform}, compile-only at most: by name only")
        )
        lines.append(f"  {name}: {reason}")
    return "\n".join(lines)


def _eligible(operation: str, implementations: Mapping[str, Callable[..., Any]], platform: str) -> tuple[str, ...]:
    verified, first = VERIFIED.get(operation, {}), PREFERRED.get(operation, {}).get(platform)
    names = sorted(implementations, key=lambda name: name != first)
    return tuple(name for name in names if name not in verified or platform in verified[name])


def _named(operation: str, implementations: Mapping[str, Callable[..., Any]], name: str) -> Callable[..., Any]:
    if name not in implementations:
        raise ValueError(f"{operation}: no implementation {name!r}; there are {sorted(implementations)}.")
    return implementations[name]
