"""State fragments: arrays of a state provider that share files, each with its place in memory and its stored dtype.

    def arrays(self):                                       # of a provider, see state_providers
        return StateFragments({
            "table": StateFragment(self.table, file="table", dtype="bfloat16"),  # a file of its own, half the bytes
            "counts": StateFragment(self.counts),                                # numpy: host memory
            "mean": StateFragment(self.mean, memory="host"),                     # from a device, for the host
        })

Each file is one leaf of the checkpoint: the fragments' bytes one after the other, copied, hashed, written and verified
as any leaf is. Names, shapes and dtypes are in the checkpoint's ``meta``. After the composable state providers of
DataStates-LLM (arXiv:2601.16956), which coalesce fragments of a state and leave its movement to the engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from jaxllm.checkpoint.errors import CheckpointError
from jaxllm.checkpoint.storage.checkpoint_manifest import dtype_from_name

Memory = Literal["device", "host"]
Index = dict[str, list[list[Any]]]
"""Fragments of each file, in order: name, shape, dtype, stored dtype."""


@dataclass(frozen=True)
class StateFragment:
    """One array of a provider's state.

    Attributes:
        value: a jax array, or a numpy array. On restore it gives shape, dtype and sharding.
        file: name of the file that it shares with other fragments of the provider.
        dtype: name of the dtype in which it is stored; None for its own.
        memory: where it is restored: "device" with the sharding of ``value``, or "host" as a numpy array; None: where
            ``value`` is.
    """

    value: Any
    file: str = "state"
    dtype: str | None = None
    memory: Memory | None = None

    @property
    def stored_dtype(self) -> np.dtype:
        """Dtype on disk."""
        return np.dtype(self.value.dtype) if self.dtype is None else dtype_from_name(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return math.prod(self.value.shape) * self.stored_dtype.itemsize

    def placed(self, array: np.ndarray) -> Any:
        """A restored array in its memory."""
        here = self.memory or ("device" if isinstance(self.value, jax.Array) else "host")
        if here == "host":
            return array
        return jax.device_put(array, self.value.sharding if isinstance(self.value, jax.Array) else None)


class StateFragments(dict[str, StateFragment]):
    """Fragments of a provider's state by name."""

    def files(self) -> dict[str, PackedFragments]:
        """Leaves of the checkpoint: the fragments of each file.

        Raises:
            CheckpointError: a value is no array of numbers, or a dtype is unknown.
        """
        for name, one in self.items():
            try:
                legal = isinstance(one.value, jax.Array | np.ndarray) and np.dtype(one.value.dtype).kind not in "OSUMm"
                assert legal
                one.stored_dtype  # noqa: B018
            except (AssertionError, TypeError) as error:
                raise CheckpointError(
                    f"state fragment {name} is a {type(one.value).__name__} to be stored as {one.dtype}: give a jax or "
                    "numpy array of numbers, and the name of a dtype; other values belong into facts()."
                ) from error
        names = dict.fromkeys(one.file for one in self.values())
        return {file: PackedFragments({n: one for n, one in self.items() if one.file == file}) for file in names}

    def index(self) -> Index:
        """Description of the files as JSON values."""
        return {
            file: [
                [name, list(one.value.shape), str(one.value.dtype), str(one.stored_dtype)]
                for name, one in packed.fragments.items()
            ]
            for file, packed in self.files().items()
        }

    def unpacked(self, files: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Restored arrays by name, each in its memory, from the bytes of the files."""
        out = {}
        for file, packed in self.files().items():
            begin = 0
            for name, one in packed.fragments.items():
                data = np.asarray(files[file])[begin : begin + one.nbytes]
                array = data.view(one.stored_dtype).reshape(one.value.shape).astype(np.dtype(one.value.dtype))
                out[name], begin = one.placed(array), begin + one.nbytes
        return {name: out[name] for name in self}


@dataclass(frozen=True)
class PackedFragments:
    """Leaf of a state: fragments that share a file; uint8 as a whole."""

    fragments: Mapping[str, StateFragment]

    @property
    def values(self) -> dict[str, Any]:
        """Arrays of the fragments by name, without those that have no elements."""
        return {name: one.value for name, one in self.fragments.items() if one.nbytes}

    @property
    def shape(self) -> tuple[int]:
        """Shape of the leaf: its bytes."""
        return (sum(one.nbytes for one in self.fragments.values()),)

    def target(self) -> np.ndarray:
        """Array of the leaf's shape, into which it is restored."""
        return np.empty(self.shape, np.uint8)

    def pieces(self, values: Mapping[str, Any]) -> Iterator[np.ndarray]:
        """Bytes of the file in pieces.

        Args:
            values: name -> call that returns the values of a fragment in pieces (``SnapshotLeaf.parts``).
        """
        for name in self.values:
            for piece in values[name]():
                stored = np.ascontiguousarray(piece.astype(self.fragments[name].stored_dtype, copy=False))
                yield stored.reshape(-1).view(np.uint8)
