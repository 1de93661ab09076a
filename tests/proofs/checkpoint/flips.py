"""Bit flips anywhere in a checkpoint are found when it is loaded, and the damaged leaf is named."""

from __future__ import annotations

import functools
import itertools
import logging
import random
import shutil
import tempfile
from pathlib import Path

import fsspec
import numpy as np
import pytest

from jaxllm.checkpoint import CheckpointCorruptError, Checkpointer
from jaxllm.checkpoint.storage import leaf_hashing
from tests.checkpoint.together import save_together
from tests.proofs.harness import proof

CHUNKS = {"params/w": (3, 5), "opt_state/mu/w": (12, 2)}
KINDS = ("one process", "three processes", "object store")
BLOCK = 100
"""Bytes; so that leaves have several blocks."""
_places = itertools.count()


def state_of(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        "params/w": rng.standard_normal((12, 10)),
        "params/gain": rng.standard_normal(7).astype(np.float32),
        "opt_state/mu/w": rng.standard_normal((12, 10)),
        "step": np.array(step),
    }


@functools.cache
def template(kind: str) -> Path:
    """Two checkpoints to copy."""
    folder = Path(tempfile.mkdtemp(prefix="jaxllm-flips-"))
    for step in (1, 2):
        many = kind == "three processes"
        save_together(str(folder), 3 if many else 1, step, state_of(step), CHUNKS if many else {}, {"cursor": step})
    return folder


def same(found: object, step: int) -> None:
    for path, array in state_of(step).items():
        leaf = functools.reduce(lambda node, key: node[key], path.split("/"), found)  # type: ignore[index]
        assert leaf.tobytes() == array.tobytes(), path


@proof("checkpoint", count=300, sample=4)
def bit_flips(seed: int) -> None:
    """Bit flips in checkpoints of one process, of three, in an object store; restored whole, by leaf, or by slice."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    block, leaf_hashing.BLOCK_BYTES = leaf_hashing.BLOCK_BYTES, BLOCK
    logger = logging.getLogger("jaxllm.checkpoint")
    logger.disabled = True
    try:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "run"
            shutil.copytree(template(kind), copy)
            newest = copy / "step_00000002"
            file = rng.choice(sorted(p for p in newest.rglob("*") if p.is_file()))
            name = file.relative_to(newest).as_posix()
            data = bytearray(file.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            file.write_bytes(data)
            place = str(copy)
            if kind == "object store":
                place = f"memory://flips-{next(_places)}"
                fsspec.filesystem("memory").put(str(copy), place, recursive=True)
            check(place, name)
    finally:
        leaf_hashing.BLOCK_BYTES = block
        logger.disabled = False


def check(place: str, name: str) -> None:
    with Checkpointer(place) as checkpointer:
        with pytest.raises(CheckpointCorruptError) as caught:
            checkpointer.restore(None, 2)
        leaf = name.split("/")[1].replace(".", "/") if name.count("/") > 1 else None
        assert caught.value.leaf == leaf, (name, str(caught.value))
        assert (leaf or name) in str(caught.value)
        with pytest.raises(CheckpointCorruptError):
            checkpointer.verify(2)
        if leaf is not None:  # a part of the leaf is as good as all of it, or refused
            record = checkpointer.manifest(2).leaves[leaf]
            refused = 0
            for row in range(record.shape[0]) if record.shape else [None]:
                index = () if row is None else (slice(row, row + 1), *(slice(None) for _ in record.shape[1:]))
                try:
                    part = checkpointer.open_leaves(2)[leaf].read(index)
                    assert part.tobytes() == state_of(2)[leaf][index].tobytes()
                except CheckpointCorruptError:
                    refused += 1
            assert refused > 0
        found = checkpointer.resume(None)
        assert found is not None
        assert found.step == 1
        assert found.meta == {"cursor": 1}
        same(found.state, 1)
        assert checkpointer.steps() == [1]
