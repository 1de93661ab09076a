"""Streamed saves: a state given in chunks makes the same checkpoint as a whole one; leaves are views of its files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxllm.checkpoint import (
    CheckpointConfig,
    CheckpointCorruptError,
    Checkpointer,
    CheckpointError,
    StreamedLeaf,
)

CONFIG = CheckpointConfig(saving="blocking")
META = {"cursor": 3}


def state() -> dict[str, Any]:
    """Leaves of several types and shapes, one without elements, one all zeros, one a single number."""
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(3, 5, 7)).astype(np.float32)
    return {
        "params": {
            "wide": wide,
            "half": wide[0].astype(ml_dtypes.bfloat16),
            "narrow": wide[1].astype(ml_dtypes.float8_e4m3fn),
            "odd.name/%": rng.integers(0, 9, (4,)),
            "zeros": np.zeros((2, 2), np.float32),
            "none": np.empty((0, 3), np.float32),
        },
        "step": np.int32(7),
    }


def streamed(tree: Any, size: int = 3) -> dict[str, StreamedLeaf]:
    """The same leaves, in chunks of ``size`` elements."""

    def pieces(array: np.ndarray) -> Any:
        flat = array.reshape(-1)
        return (flat[i : i + size] for i in range(0, flat.size, size))

    params = {f"params/{n.replace('%', '%25').replace('/', '%2F')}": a for n, a in tree["params"].items()}
    leaves = params | {"step": np.asarray(tree["step"])}
    return {path: StreamedLeaf(a.shape, a.dtype, pieces(a)) for path, a in leaves.items()}


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file() and f.name != ".lock"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with Checkpointer(tmp_path / "streamed", CONFIG) as checkpointer:
        assert checkpointer.save_streamed(5, streamed(state()), META)
        assert not checkpointer.save_streamed(5, {}, META)
    return tmp_path / "streamed"


def test_every_file_is_the_one_that_save_makes(saved: Path, tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "whole", CONFIG) as checkpointer:
        checkpointer.save(5, state(), META)
    one, other = files(tmp_path / "whole"), files(saved)
    # The manifest lists leaves in the order of their saving.
    manifests = [json.loads(f.pop("step_00000005/manifest.json")) for f in (one, other)]
    assert manifests[0]["leaves"] == manifests[1]["leaves"]
    assert manifests[0]["files"] == manifests[1]["files"]
    assert one == other


def test_it_is_read_by_this_package_and_by_orbax(saved: Path) -> None:
    with Checkpointer(saved, read_only=True) as checkpointer:
        checkpointer.verify()
        found, meta = checkpointer.restore()
    assert meta == META
    jax.tree.map(np.testing.assert_array_equal, found, state())
    theirs = ocp.PyTreeCheckpointer().restore(saved / "step_00000005" / "state")
    np.testing.assert_array_equal(theirs["params"]["wide"], state()["params"]["wide"])
    np.testing.assert_array_equal(theirs["params"]["half"], state()["params"]["half"])


def test_leaves_are_views_of_the_files(saved: Path) -> None:
    with Checkpointer(saved, read_only=True) as checkpointer:
        leaves = checkpointer.map_leaves()
        assert checkpointer.map_leaves(prefix="carried") == {}
    want = state()["params"]
    assert set(leaves) == {n.replace("%", "%25").replace("/", "%2F") for n in want}
    for name, array in want.items():
        mine = leaves[name.replace("%", "%25").replace("/", "%2F")]
        assert (mine.dtype, mine.shape) == (array.dtype, array.shape)
        assert mine.tobytes() == array.tobytes()
        assert not mine.size or not mine.flags.writeable


@pytest.mark.parametrize("change", ["flip", "cut", "remove"])
def test_a_view_of_a_damaged_file_is_refused(saved: Path, change: str) -> None:
    file = next(f for f in (saved / "step_00000005" / "state" / "params.wide").iterdir() if f.name != ".zarray")
    data = bytearray(file.read_bytes())
    data[17] ^= 1
    if change == "remove":
        file.unlink()
    else:
        file.write_bytes(data if change == "flip" else data[:-4])
    with Checkpointer(saved, read_only=True) as checkpointer, pytest.raises(CheckpointCorruptError, match="wide"):
        checkpointer.map_leaves()


def test_leaves_of_a_state_on_devices_map_too(tmp_path: Path) -> None:
    params = {"w": jnp.arange(12.0).reshape(3, 4)}
    with Checkpointer(tmp_path, CONFIG) as checkpointer:
        checkpointer.save(1, {"params": params}, META)
        np.testing.assert_array_equal(checkpointer.map_leaves()["w"], params["w"])


def test_pieces_that_do_not_make_the_leaf_leave_nothing(tmp_path: Path) -> None:
    def failing() -> Any:
        yield np.ones(2, np.float32)
        raise RuntimeError("the source is gone")

    good = np.ones(4, np.float32)
    cases = {
        "has 16 bytes, and its pieces have 8": [good[:2]],
        "pieces have 32": itertools.repeat(good, 2),
        "a piece of it is float64": [good.astype(np.float64)],
        "the source is gone": failing(),
    }
    with Checkpointer(tmp_path, CONFIG) as checkpointer:
        for message, pieces in cases.items():
            leaf = StreamedLeaf((4,), np.dtype(np.float32), pieces)
            with pytest.raises(CheckpointError, match=message):
                checkpointer.save_streamed(1, {"params/w": leaf}, META)
            assert checkpointer.steps() == []
            assert {f.name for f in tmp_path.iterdir()} == {".lock"}
