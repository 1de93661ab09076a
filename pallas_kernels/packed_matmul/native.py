"""Packed matmul on CPUs: a kernel in C++ (``native.cc``), built on first use and called through XLA's FFI.

It reads codes and scales as formats store them, of one layer within a stack, and dequantises them in registers. The
system's C++ compiler builds it for this processor, with the headers that jaxlib brings, into
``$JAXLLM_CACHE/kernels``; where there is none, ``missing`` says so and plain JAX is used.

Legend: M rows, K inputs, N outputs, L layers, B bytes of an output, P stored parameters of a group, G groups of inputs,
S blocks of 256 inputs.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.metadata
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped, UInt8

from pallas_kernels._compat import processor_features, vary_over, varying_axes
from pallas_kernels.packed_matmul.codes import PackedBytes, PackedCodes, by_column, result_dtype
from pallas_kernels.packed_matmul.scales import Scales

SOURCES = ("native.cc", "native_vectors.h")
FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-ffp-contract=off", "-w")
PROCESSOR = ("-march=native",)
"""The compiler's flags for the processor that programs run on."""
NativeKind = Literal["scale", "minimum", "zero", "exponent", "blocks", "signed_blocks", "blocks_with_minima"]
"""Kind of a group's stored parameters; the order is that of the enum ``Kind`` of native.cc."""
FEWEST = 16
"""Outputs of a vector."""
MOST_ROWS = 512
"""Rows that are multiplied with packed codes; with more, XLA dequantises the matrix in as little time."""
COMPILE_SECONDS = 300


class NativeForm(NamedTuple):
    """Codes and parameters of groups as they are stored, static.

    Attributes:
        bits: of a code: 2, 3, 4, 5, 6 or 8.
        groups: of inputs.
        kind: what is stored for a group: its scale, and the value of code 0 ("minimum") or the code of 0 ("zero"); a
            scale's exponent; or blocks of k-quants.
        levels: values of codes of up to 4 bits; None: the code less the middle one.
        stored: parameters of a group, or bytes of a block.
    """

    bits: int
    groups: int
    kind: NativeKind = "scale"
    levels: tuple[float, ...] | None = None
    stored: int = 1


def packed_matmul_native(
    x: Float[Array, "M K"], packed: PackedBytes, scales: Scales, form: PackedCodes
) -> Float[Array, "M _"]:
    """Packed matmul on CPUs; see ``packed_matmul``. Weights are not rounded to ``x.dtype`` before they are multiplied.

    Raises:
        NotImplementedError: there is no compiler, x is float64, or the codes have a table of more than 16 levels.
    """
    packed, scales = by_column(packed, scales, form)
    groups, columns = scales.shape
    kind = "exponent" if scales.dtype == jnp.uint8 else "scale"
    found = NativeForm(form.bits, groups, kind, form.levels)
    if why := unsupported(x.dtype, scales.dtype, found) or missing():
        raise NotImplementedError(f"native {why}")
    spare = max(0, FEWEST - columns)
    packed, scales = (jnp.pad(a, ((0, 0), (0, spare))) for a in (packed, scales)) if spare else (packed, scales)
    return stored_matmul(x, packed[None], scales[None, None], found)[:, :columns].astype(result_dtype(x.dtype, form))


def unsupported(dtype: jnp.dtype, scales: jnp.dtype, form: NativeForm) -> str:
    """Why the kernel does not take activations and scales of these dtypes, or the codes; empty where it does."""
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"takes activations in float32, bfloat16 and float16, not {jnp.dtype(dtype).name}."
    if scales not in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.uint8):
        return f"takes scales in float32, bfloat16 and float16, not {jnp.dtype(scales).name}."
    if form.bits not in (2, 3, 4, 5, 6, 8) or (form.levels is not None and form.bits > 4):
        levels = f" with {len(form.levels)} levels" if form.levels else ""
        return f"takes codes of 2, 3, 4, 5, 6 and 8 bits, with at most 16 levels, not {form.bits} bits{levels}."
    return ""


def stored_matmul(
    x: Float[Array, "M K"],
    codes: UInt8[Array, "L B N"],
    parameters: Shaped[Array, "L P G N"],
    form: NativeForm,
    layer: Int[Array, ""] | int = 0,
) -> Float[Array, "M N"]:
    """Matmul with one layer of a stack of codes and parameters, in float32.

    A row's result does not depend on the others. The caller has asked ``unsupported`` and ``missing``.

    Args:
        codes: at least ``FEWEST`` outputs.
        parameters: of groups, or bytes of k-quants [L, P, S, N].
        layer: that is multiplied.
    """
    return _call(x, codes, parameters, form, layer, codes.shape[2], False)


def stored_row_matmul(
    x: Float[Array, "M K"], codes: UInt8[Array, "N K"], scales: Float[Array, "N 1 G"], form: NativeForm
) -> Float[Array, "M N"]:
    """``x @ w^T`` with an output matrix in codes of 8 bits, in float32; see ``stored_matmul``.

    Args:
        scales: of groups of a multiple of ``FEWEST`` inputs.
    """
    return _call(x, codes[None], scales[None], form, 0, codes.shape[0], True)


def _call(
    x: Array, codes: Array, parameters: Array, form: NativeForm, layer: Array | int, columns: int, by_rows: bool
) -> Array:
    _registered(PROCESSOR, _target())
    levels = [] if form.bits > 4 else form.levels or np.arange(2**form.bits) - 2.0 ** (form.bits - 1)
    made = jax.ShapeDtypeStruct((x.shape[0], columns), jnp.float32)
    y = jax.ffi.ffi_call(_target(), made, vmap_method="sequential")(
        x.astype(jnp.float32),
        jnp.asarray(layer, jnp.int32),
        codes,
        parameters,
        bits=np.int64(form.bits),
        groups=np.int64(form.groups),
        kind=np.int64(get_args(NativeKind).index(form.kind)),
        by_rows=by_rows,
        levels=np.resize(np.asarray(levels, np.float32), 16 if len(levels) else 0),
    )
    # A call does not say over which axes its result varies.
    return vary_over(y, varying_axes(x, codes, parameters))


def missing() -> str:
    """Reason why the kernel cannot be used on this machine; empty where it can. The first call builds it."""
    try:
        _library(PROCESSOR)
    except _Missing as reason:
        return str(reason)
    return ""


def vectors() -> str:
    """Instructions that the kernel was built for: "AVX-512", "AVX2" or "plain C++"; empty where it is missing."""
    return "" if missing() else _library(PROCESSOR).jaxllm_packed_matmul_vectors().decode()


@functools.cache
def not_by_default() -> str:
    """Why the kernel is used by name alone here, in words; empty where it may be a default. Printed once.

    Where it may be one, programs with the kernel that another process has compiled can be loaded from here on.
    """
    why = missing()
    if not why and vectors() == "plain C++":
        why = "has no AVX2 here, without which XLA's own loops are faster."
    if why:
        print(f"packed_matmul: the kernel native {why} XLA's matmul is used.", file=sys.stderr)
    else:
        _registered(PROCESSOR, _target())
    return why


class _Missing(Exception):
    """The kernel cannot be built or loaded here."""


def _target() -> str:
    """Name of the handler; one for each choice of flags, of which a process has one, other than in tests."""
    return "jaxllm_packed_matmul" + ("" if PROCESSOR == ("-march=native",) else "".join(PROCESSOR))


@functools.cache
def _registered(processor: tuple[str, ...], target: str) -> None:
    """Registers the handler under its name, which a program that was compiled by another process has too."""
    handler = jax.ffi.pycapsule(_library(processor).JaxllmPackedMatmul)
    jax.ffi.register_ffi_target(target, handler, platform="cpu")


@functools.cache
def _library(processor: tuple[str, ...]) -> ctypes.CDLL:
    """The kernel, built if the cache has none of this source, compiler, processor and jaxlib.

    Raises:
        _Missing: says what is missing.
    """
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise _Missing(f"needs a C++ compiler, and {shlex.join(compiler)} does not run here ({error}); install one, "
                       "or name it in $CXX.") from error  # fmt: skip
    file = _folder() / f"packed_matmul-{_key(version, (*compiler, *processor))}.so"
    try:
        with _alone(file.with_suffix(".lock")):
            if not file.exists():
                _build(compiler, processor, file)
        library = ctypes.CDLL(str(file))
        library.jaxllm_packed_matmul_vectors.restype = ctypes.c_char_p
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", b"") or str(error).encode()
        raise _Missing(f"cannot be built: {detail.decode(errors='replace').strip()[-500:]}") from error
    return library


def _build(compiler: Sequence[str], processor: Sequence[str], file: Path) -> None:
    """Compiles into the cache at once, so that another process sees none or a whole one."""
    source = Path(__file__).with_name(SOURCES[0])
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        made = Path(scratch) / file.name
        command = [*compiler, *FLAGS, *processor, "-isystem", jax.ffi.include_dir(), str(source), "-o", str(made)]
        subprocess.run(command, capture_output=True, check=True, timeout=COMPILE_SECONDS)
        os.replace(made, file)


class _alone:
    """Context manager that one process at a time is in; the others wait for what it builds."""

    def __init__(self, file: Path):
        self.file = file

    def __enter__(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.held = self.file.open("w")
        fcntl.flock(self.held, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self.held.close()


def _key(version: bytes, command: Sequence[str]) -> str:
    """Digest of all that the built library depends on."""
    text = hashlib.sha256(version)
    for name in SOURCES:
        text.update(Path(__file__).with_name(name).read_bytes())
    text.update(repr([FLAGS, command, importlib.metadata.version("jaxlib"), processor_features()]).encode())
    return text.hexdigest()[:16]


def _folder() -> Path:
    return Path(os.environ.get("JAXLLM_CACHE") or "~/.cache/jaxllm").expanduser() / "kernels"
