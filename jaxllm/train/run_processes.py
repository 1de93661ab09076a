"""Multi-process runs: what all processes must agree on, and which rows of a batch each process loads."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

import pallas_kernels
import sharding
from jaxllm.config import flat
from jaxllm.data import Batch
from jaxllm.train.config import RunConfig
from jaxllm.train.records.receipt import versions

COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")
"""Environment variables that change what is compiled."""


def fingerprint(config: RunConfig) -> dict[str, Any]:
    """Settings that must be equal in all processes before a device is used: versions, source code, configuration."""
    packages = {f"version of {name}": version for name, version in versions().items()}
    packages["version of jaxllm"] = importlib.metadata.version("jaxllm")
    settings = {name: os.environ.get(name, "") for name in COMPILER_VARIABLES}
    return {**packages, "source code": source_hash(), **settings, **flat(config)}


def source_hash() -> str:
    """Hash of the source code of jaxllm, pallas_kernels and sharding: 12 hex digits of SHA-256."""
    digest = hashlib.sha256()
    for package in (Path(__file__).parents[1], Path(*pallas_kernels.__path__), Path(*sharding.__path__)):
        for file in sorted(package.rglob("*.py")):
            digest.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def device_fingerprint(mesh: Mesh, data: str) -> dict[str, Any]:
    """Facts that must be equal in all processes before anything is compiled: devices, mesh and data.

    Args:
        mesh: of the run.
        data: fingerprint of the training data.
    """
    local = jax.local_devices()
    return {
        "devices of each process": f"{len(local)} x {local[0].device_kind}",
        "devices of all": jax.device_count(),
        "mesh": str(dict(mesh.shape)),
        "data": data[:12],
    }


def local_part(where: NamedSharding, shape: Sequence[int]) -> tuple[int, int]:
    """Part of a batch's rows that this process loads, ``(part, parts)``.

    It is the smallest of equal consecutive parts that contains all rows of the process's devices. These need not be
    neighbours in the mesh; then the process loads rows that it does not need, at worst all.

    Args:
        where: sharding of the batch.
        shape: of the batch, [B, S].
    """
    indices: Any = where.addressable_devices_indices_map(tuple(shape))
    return covering_part([rows.indices(shape[0])[:2] for rows, *_ in indices.values()], shape[0])


def covering_part(spans: Sequence[tuple[int, int]], rows: int) -> tuple[int, int]:
    """``(part, parts)``: the smallest of equal consecutive parts of ``rows`` with all spans ``(begin, end)``."""
    begin, end = min(span[0] for span in spans), max(span[1] for span in spans)
    for parts in range(rows, 1, -1):
        each, left = divmod(rows, parts)
        if not left and begin // each == (end - 1) // each:
            return begin // each, parts
    return 0, 1


def put_batch(batch: Batch, where: NamedSharding, rows: int, begin: int = 0) -> Batch:
    """Global batch of ``rows`` rows on the devices of all processes.

    Args:
        batch: host arrays with the rows from ``begin`` on; they include all rows of this process's devices.
        where: sharding of the batch.
        rows: of the global batch.
        begin: first row of ``batch``.
    """

    def place(part: np.ndarray) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            first, last, _ = index[0].indices(rows)
            return part[(slice(first - begin, last - begin), *index[1:])]

        return jax.make_array_from_callback((rows, *part.shape[1:]), where, shard)

    return jax.tree.map(place, batch)
