"""Experts in files: those of each mixture layer in a file of its own, of which one read takes one expert.

For mixtures that the host's memory does not hold (EdgeMoE, arXiv:2308.14352). The host keeps those that are read most
often: the layers of a step take turns, so those that were read last would have left when their layer comes again.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxllm.files import digest, exclusive, read_json, write_json
from jaxllm.infer.streaming.experts.host_experts import HostExperts
from jaxllm.infer.streaming.weight_file import (
    WeightsUnavailableError,
    arrays_of,
    bytes_in_file,
    described,
    file_state,
    read_bytes,
    write_arrays,
)


@dataclass
class ExpertReads:
    """Counts of reads of experts.

    Attributes:
        reads: experts that were read from files.
        read_bytes: their bytes.
        from_host: experts that were found in the host's memory.
    """

    reads: int = 0
    read_bytes: int = 0
    from_host: int = 0


class ExpertFiles:
    """Files of the experts of a model, which are found again while what they were made of is the same.

    Args:
        directory: a directory of its own is made in it for each ``key``.
        key: what the weights are made of; a JSON value.
        host_bytes: most bytes of experts that stay in the host's memory.

    Raises:
        WeightsUnavailableError: the directory cannot be written.

    Attributes:
        directory: where the files are.
        counts: what was read.
    """

    def __init__(self, directory: Path, key: Sequence[Any], host_bytes: int):
        self.directory, self.counts = directory / f"experts-{digest(list(key))[:16]}", ExpertReads()
        self._host_bytes, self._held_bytes, self._lock = host_bytes, 0, threading.Lock()
        self._held, self._uses = dict[tuple[int, int], Any](), collections.Counter[tuple[int, int]]()
        self._index = self.directory / "experts.json"
        with _writing_in(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)

    def add(self, layer: int, experts: HostExperts) -> FileExperts:
        """Experts of a layer, which are written unless their file is there; of several processes one writes it.

        Raises:
            WeightsUnavailableError: the directory cannot be written, such as on a full disk.
        """
        path = self.directory / f"experts-{layer:04d}.bin"
        templates = [jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), one) for one in experts.each]
        shapes = digest([described(one) for one in templates])
        with _writing_in(self.directory), exclusive(self.directory):
            index = read_json(self._index) if self._index.is_file() else {}
            if not path.is_file() or index.get(path.name, [])[:3] != [shapes, *file_state(path)]:
                checksums = write_arrays(path, experts.each)
                index[path.name] = [shapes, *file_state(path), checksums]
                write_json(self._index, index)
        _, size, changed, checksums = index[path.name]
        return FileExperts(self, layer, path, (size, changed), templates, checksums, experts.whole)

    def held(self, layer: int, expert: int) -> Any:
        """An expert that is in the host's memory; None: it is not."""
        with self._lock:
            self._uses[layer, expert] += 1
            content = self._held.get((layer, expert))
            self.counts.from_host += content is not None
            return content

    def keep(self, layer: int, expert: int, content: Any) -> None:
        """Keeps an expert that was read, if there is room, or in the place of experts that were read less often."""
        own, size = (layer, expert), _bytes_of(content)
        with self._lock:
            self.counts.reads += 1
            self.counts.read_bytes += size
            if own in self._held:
                return
            leaving, room = list[tuple[int, int]](), self._host_bytes - self._held_bytes
            for other in sorted(self._held, key=lambda other: self._uses[other]):
                if room >= size or self._uses[other] >= self._uses[own]:
                    break
                leaving.append(other)
                room += _bytes_of(self._held[other])
            if room < size:
                return
            for other in leaving:
                del self._held[other]
            self._held[own] = content
            self._held_bytes = self._host_bytes - room + size

    @property
    def held_bytes(self) -> int:
        """Bytes of experts in the host's memory."""
        return self._held_bytes


class FileExperts:
    """Experts of one mixture layer in a file, see ``HostExperts``.

    Attributes:
        tier: "disk".
        whole: see ``HostExperts``.
        path: the file.
    """

    tier = "disk"

    def __init__(
        self,
        files: ExpertFiles,
        layer: int,
        path: Path,
        state: tuple[int, int],
        templates: Sequence[Any],
        checksums: Sequence[int],
        whole: Any,
    ):
        self.files, self.path, self.whole, self._layer, self._state = files, path, whole, layer, state
        self._templates, self._checksums, self._checked = templates, checksums, set[int]()
        self._begins = [0, *itertools.accumulate(map(bytes_in_file, templates))]

    def __len__(self) -> int:
        return len(self._templates)

    @property
    def shapes(self) -> Sequence[Any]:
        """Shapes of each expert's arrays."""
        return self._templates

    def read(self, expert: int) -> Any:
        """Arrays of an expert, [1, ...], from the host's memory or the file. Several threads read at a time.

        Raises:
            WeightsUnavailableError: the file cannot be read, was changed or is damaged.
        """
        if (content := self.files.held(self._layer, expert)) is not None:
            return content
        begin, end = self._begins[expert : expert + 2]
        checksum = None if expert in self._checked else self._checksums[expert]
        what = f"layer {self._layer}, expert {expert}"
        content = arrays_of(
            read_bytes(self.path, self._state, what, checksum, begin, end - begin), self._templates[expert]
        )
        self._checked.add(expert)
        self.files.keep(self._layer, expert, content)
        return content


@contextlib.contextmanager
def _writing_in(directory: Path) -> Iterator[None]:
    """Errors of the system in the body are those of a directory that cannot be written."""
    try:
        yield
    except OSError as error:
        raise WeightsUnavailableError(
            f"{directory}: the experts cannot be written there: {error}. Give a directory with room for them."
        ) from error


def _bytes_of(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))
