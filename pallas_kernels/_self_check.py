"""Self-check: before a kernel's first use on a kind of device, its values are compared there with the reference, once.

The kernels of this package are compared with float64 in Pallas' interpreters, and compiled for every device; neither
shows what a device's own compiler makes of them. So when ``implementation=None`` is about to choose the kernel of an
operation on a device that is attached, the kernel runs there on a few small samples, in bfloat16 and in float32,
forward and backward. One that differs from the reference is not chosen, and a warning says so.

The verdict is kept in ``$JAXLLM_CACHE/kernels`` (``~/.cache/jaxllm/kernels``), by the source of the operation, the kind
of device, and the versions of Python, JAX and the driver, so that other processes check nothing. A program that is
compiled for a device which is not attached goes by the stored verdict for it; without one the kernel is chosen, as on a
device where its check passes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels._compat import TargetDevice, processor_features

SAMPLES = {
    "flash_attention": "pallas_kernels.flash_attention.check_samples",
    "linear_cross_entropy": "pallas_kernels.cross_entropy.check_samples",
    "grouped_matmul": "pallas_kernels.grouped_matmul.check_samples",
    "fused_moe": "pallas_kernels.fused_moe.check_samples",
    "grouped_lora": "pallas_kernels.grouped_lora.check_samples",
    "packed_matmul": "pallas_kernels.packed_matmul.check_samples",
    "ternary_matmul": "pallas_kernels.ternary_matmul.check_samples",
    "paged_attention": "pallas_kernels.paged_attention.check_samples",
    "recurrent": "pallas_kernels.recurrent.check_samples",
}
"""Operation -> module with ``samples(dtype)``. A ring needs several devices: it is checked by its tests alone."""

DTYPES = ("bfloat16", "float32")
BOUNDS = {"bfloat16": 2e-2, "float32": 2e-3}
"""Largest legal error of each result, over the largest element of the reference's. A mask that is off by one, a missing
rescale or a wrong scale are above 5e-2; rounding to bfloat16 is below 8e-3, tf32's below 2e-3."""


class Sample(NamedTuple):
    """One call to compare.

    Attributes:
        label: of the sample, for messages.
        run: ``(implementation, *arrays) -> tree of arrays``.
        arrays: trees of arrays; the differentiated ones first.
        differentiated: how many have gradients.
    """

    label: str
    run: Callable[..., Any]
    arrays: tuple[Any, ...]
    differentiated: int = 0


@dataclass(frozen=True)
class Verdict:
    """Result of a self-check.

    Attributes:
        operation, implementation: the kernel.
        device: kind of the device.
        passed: whether the kernel may be chosen there.
        errors: dtype -> largest error over the reference's largest element.
        why: why it may not; empty otherwise.
        seconds: that the check took.
    """

    operation: str
    implementation: str
    device: str
    passed: bool
    errors: dict[str, float]
    why: str
    seconds: float

    def __str__(self) -> str:
        worst = ", ".join(f"{dtype} {error:.1e}" for dtype, error in self.errors.items())
        if self.passed:
            return f"compared with the reference on {self.device} ({worst})"
        return f"not chosen on {self.device}: {self.why}"


_verdicts: dict[str, Verdict] = {}
_lock = threading.Lock()


def may_choose(operation: str, implementation: str, device: TargetDevice) -> Verdict | None:
    """Verdict on a kernel for a device; None where there is none and the kernel may be chosen without.

    The first call for an attached device of that kind compares the kernel with the reference, which takes seconds.

    Args:
        operation: such as "flash_attention".
        implementation: such as "pallas_gpu".
        device: that the program is traced for.

    Raises:
        RuntimeError: the check failed on one of several processes, which would else run different programs.
    """
    if operation not in SAMPLES:
        return None
    attached = _attached(device)
    file = _file(operation, implementation, device.kind)
    with _lock:
        if (known := _verdicts.get(file.name)) is not None:
            return known
        found = _read(file)
        if found is None and attached is not None:
            found = _isolated(operation, implementation, attached)
            if np.isfinite(list(found.errors.values())).all() and found.errors:
                _write(file, found)  # a check that could not run, for want of memory say, is repeated
            print(f"{operation}: {implementation} {found}", file=sys.stderr)
        if found is not None:
            _verdicts[file.name] = found
    if found is not None and not found.passed and attached is not None:
        message = f"{operation}: the kernel {implementation} is {found}; a slower implementation is used."
        if jax.process_count() > 1:
            raise RuntimeError(
                f"{message} With several processes all must use the same one: give implementation= by name, or make "
                f"the kernel work on process {jax.process_index()}."
            )
        warnings.warn(message, stacklevel=2)
    return found


def stored_verdicts() -> list[Verdict]:
    """All stored verdicts."""
    return [found for file in sorted(_folder().glob("*.json")) if (found := _read(file)) is not None]


def check(operation: str, implementation: str, device: jax.Device) -> Verdict:
    """Compares a kernel with the reference on a device, in a thread that is not tracing.

    Args:
        operation: a key of ``SAMPLES``.
        implementation: name of the kernel.
        device: to run it on.
    """
    began, errors, why, refused = time.perf_counter(), dict[str, float](), "", ""
    module = importlib.import_module(SAMPLES[operation])
    with jax.default_device(device):
        for dtype in DTYPES:
            for sample in module.samples(dtype):
                try:
                    error = _error(sample, implementation)
                except NotImplementedError as refusal:  # of a dtype, say: a call would go on to the next implementation
                    refused = str(refusal)
                    continue
                except Exception as failure:  # whatever a device's compiler raises
                    error, why = float("inf"), why or f"{dtype}, {sample.label}: {type(failure).__name__}: {failure}"
                errors[dtype] = max(errors.get(dtype, 0.0), error)
                if not error <= BOUNDS[dtype]:
                    why = why or f"{dtype}, {sample.label}: differs from the reference by {error:.1e} of its largest"
    if not errors:
        why = f"it takes none of the samples: {refused}"
    kind = device.device_kind
    return Verdict(operation, implementation, kind, not why, errors, why, time.perf_counter() - began)


def _isolated(operation: str, implementation: str, device: jax.Device) -> Verdict:
    """``check`` in a new thread: tracing, meshes in scope and x64 mode belong to the caller's."""
    found: list[Verdict] = []
    thread = threading.Thread(target=lambda: found.append(check(operation, implementation, device)))
    thread.start()
    thread.join()
    if not found:
        raise RuntimeError(f"{operation}: the self-check of {implementation} ended without a verdict.")
    return found[0]


def _error(sample: Sample, implementation: str) -> float:
    """Largest error of the results and gradients, over the reference's largest element; nan counts as infinite."""
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if _is_float(x) else x, sample.arrays)
    found = _results(functools.partial(sample.run, implementation), sample.arrays, sample.differentiated)
    with jax.default_matmul_precision("highest"):
        wanted = _results(functools.partial(sample.run, "reference"), exact, sample.differentiated)
    worst = 0.0
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        x, y = (np.asarray(leaf, np.float32) for leaf in (one, other))
        error = float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-6))
        worst = max(worst, error if np.isfinite(error) else float("inf"))
    return worst


def _results(function: Callable[..., Any], arrays: tuple[Any, ...], differentiated: int) -> Any:
    def run(*arrays: Any) -> Any:
        if not differentiated:
            return function(*arrays), ()
        rest = arrays[differentiated:]
        out, pull = jax.vjp(lambda *own: function(*own, *rest), *arrays[:differentiated])
        # The same gradient of the result for both: smooth, and of the size of the elements.
        d_out = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), out)
        return out, pull(jax.tree.map(lambda d, x: d.astype(x.dtype), d_out, out))

    return jax.jit(run)(*arrays)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def normal(seed: int, *shape: int, dtype: DTypeLike) -> jax.Array:
    """Normal numbers of a seed."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def _attached(device: TargetDevice) -> jax.Device | None:
    """Attached device of that kind."""
    local = jax.local_devices()
    return next((one for one in local if one.device_kind == device.kind), None)


def _folder() -> Path:
    return Path(os.environ.get("JAXLLM_CACHE") or "~/.cache/jaxllm").expanduser() / "kernels"


def _file(operation: str, implementation: str, kind: str) -> Path:
    return _folder() / f"{operation}-{implementation}-{_digest(operation, implementation, kind)}.json"


@functools.cache
def _digest(operation: str, implementation: str, kind: str) -> str:
    """Digest of all that a verdict depends on."""
    own = Path(importlib.import_module(SAMPLES[operation]).__file__ or "").parent
    shared = Path(__file__).parent
    text = hashlib.sha256()
    for file in sorted(
        [*own.glob("*.py"), *own.glob("*.cc"), *own.glob("*.h"), *shared.glob("*.py"), *(shared / "tuned").glob("*")]
    ):
        if file.is_file():
            text.update(file.name.encode() + b"\0" + file.read_bytes())
    driver = (
        processor_features()
        if kind == "cpu"
        else next((one.client.platform_version for one in jax.local_devices() if one.device_kind == kind), "")
    )
    versions = platform.python_version(), jax.__version__, importlib.metadata.version("jaxlib"), driver
    text.update(json.dumps([operation, implementation, kind, *versions]).encode())
    return text.hexdigest()[:16]


def _read(file: Path) -> Verdict | None:
    try:
        return Verdict(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None  # absent, or cut off: checked again


def _write(file: Path, verdict: Verdict) -> None:
    """Writes a verdict at once, so that another process sees none or a whole one."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as scratch:
            json.dump(dataclasses.asdict(verdict), scratch)
        os.replace(scratch.name, file)
    except OSError as error:
        warnings.warn(f"the verdict on {verdict.implementation} cannot be stored: {error}", stacklevel=2)
