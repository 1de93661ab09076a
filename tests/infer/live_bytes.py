"""Live bytes: those of the arrays that are on each device when programs are called, and the most of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax


class LiveBytes:
    """Most bytes on each device of arrays that were made after this.

    Args:
        counted: arrays that count; all of them, unless told.

    Attributes:
        most: by device.
    """

    def __init__(self, counted: Callable[[jax.Array], bool] = lambda _: True) -> None:
        self._counted = counted
        self._before = jax.live_arrays()  # kept, so that no other array gets the number of one of these
        self._ids = set(map(id, self._before))
        self.most: Counter[jax.Device] = Counter()

    def look(self) -> None:
        """Counts what is there now."""
        self.most |= self.now()

    def now(self) -> Counter[jax.Device]:
        """Bytes that are on each device now."""
        found: Counter[jax.Device] = Counter()
        for x in jax.live_arrays():
            if id(x) not in self._ids and self._counted(x):
                size = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
                found.update(dict.fromkeys(x.sharding.device_set, size))
        return found


class WatchedPrograms(Mapping[str, Any]):
    """Programs of an engine, of which one runs at a time; what is live is looked at whenever one is called.

    Args:
        programs: the programs.
        live: what looks.
        settle: called before that: waits for what is read ahead, so that all that may be there is there.
    """

    def __init__(self, programs: Mapping[str, Any], live: LiveBytes, settle: Callable[[], object]):
        self._programs, self._live, self._settle = programs, live, settle

    def __getitem__(self, name: str) -> Any:
        program = self._programs[name]

        def run(*arguments: Any) -> Any:
            self._settle()
            self._live.look()
            return jax.block_until_ready(program(*arguments))

        return run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._programs, name)

    def __iter__(self) -> Any:
        return iter(self._programs)

    def __len__(self) -> int:
        return len(self._programs)
