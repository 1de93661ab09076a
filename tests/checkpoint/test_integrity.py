"""Checkpoint integrity: damage is found, named and skipped; a wrong state is refused with the right names."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.checkpoint import (
    CheckpointConfig,
    CheckpointCorruptError,
    Checkpointer,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from jaxllm.checkpoint.storage import leaf_hashing
from jaxllm.checkpoint.storage.stored_leaf import CorruptDataError
from tests.checkpoint.states import assert_same, make_state

BLOCKING = CheckpointConfig(saving="blocking", keep_last=9)


@pytest.fixture
def run(tmp_path):
    """Three checkpoints, steps 100 to 300."""
    with Checkpointer(tmp_path, BLOCKING) as checkpointer:
        for step in (100, 200, 300):
            checkpointer.save(step, make_state(0, step), {"cursor": step})
    return tmp_path


def flip(file, offset):
    data = bytearray(file.read_bytes())
    data[offset] ^= 0x10
    file.write_bytes(data)


def test_every_file_flipped_in_turn(run, rng):
    """Whatever file it is, restoring either names the damage or, never here, gives the right bits."""
    newest, state = run / "step_00000300", make_state(0, 300)
    files = sorted(p for p in newest.rglob("*") if p.is_file())
    assert {"manifest.json", "meta.json", "_METADATA", ".zarray"} <= {p.name for p in files}
    with Checkpointer(run, read_only=True) as reader:
        leaves = reader.manifest().leaves
        for file in files:
            sound = file.read_bytes()
            for offset in {0, len(sound) - 1, int(rng.integers(len(sound)))}:
                flip(file, offset)
                with pytest.raises(CheckpointCorruptError, match=r"step 300 .*restore\(step=200\)") as caught:
                    reader.restore(state)
                name = file.relative_to(newest).as_posix()
                assert caught.value.step == 300
                assert caught.value.leaf in leaves or caught.value.file == name
                if name.count("/") > 1:
                    assert caught.value.leaf == name.split("/")[1].replace(".", "/")
                file.write_bytes(sound)
        assert_same(reader.restore(state)[0], state)


@pytest.mark.parametrize("damage", ["cut", "longer", "missing", "folder"])
def test_cut_and_missing_files(run, damage):
    file = run / "step_00000300" / "state" / "params.blocks.wq" / "0.0.0"
    data = file.read_bytes()
    if damage == "cut":
        file.write_bytes(data[:-1])
    elif damage == "longer":
        file.write_bytes(data + b"x")
    elif damage == "missing":
        file.unlink()
    else:
        shutil.rmtree(file.parent)
    with Checkpointer(run, read_only=True) as reader:
        with pytest.raises(CheckpointCorruptError, match=r"leaf params/blocks/wq, file state/params\.blocks\.wq/"):
            reader.restore(make_state(0, 300))
        with pytest.raises(CheckpointCorruptError):
            reader.verify()
        reader.verify(200)


def test_resume_goes_back_loudly(run, caplog):
    flip(run / "step_00000300" / "state" / "params.embed" / "0.0", 5)
    (run / "step_00000200" / "meta.json").write_text("{}")
    with Checkpointer(run) as checkpointer:
        with caplog.at_level(logging.ERROR):
            found = checkpointer.resume(make_state(0, 1))
        assert found.step == 100
        assert found.meta == {"cursor": 100}
        assert_same(found.state, make_state(0, 100))
        assert re.search(r"CORRUPT CHECKPOINT, going back to step 100.*300.*params/embed", caplog.text)
        assert re.search(r"CORRUPT CHECKPOINT, going back to step 100.*200.*meta.json.*corrupt_00000200", caplog.text)
        # Out of the way, so that training reaches these steps again; not deleted.
        assert checkpointer.steps() == [100]
        assert (run / "corrupt_00000300").is_dir()
        checkpointer.save(200, make_state(0, 200), {})
        checkpointer.wait()
        assert checkpointer.latest_good() == 200
    with Checkpointer(run) as checkpointer:
        assert (run / "corrupt_00000300").is_dir()


def test_readers_step_over_without_touching(run, caplog):
    flip(run / "step_00000300" / "manifest.json", 40)
    before = sorted(p.name for p in run.iterdir())
    with Checkpointer(run, read_only=True) as reader:
        assert reader.latest() == 300
        assert reader.latest_good() == 200
        assert reader.resume(make_state(0, 1)).step == 200
        with pytest.raises(CheckpointError, match="read-only"):
            reader.save(400, {}, {})
    assert sorted(p.name for p in run.iterdir()) == before
    assert "CORRUPT" in caplog.text


def test_nothing_good_is_an_error_not_a_fresh_start(run):
    for step in (100, 200, 300):
        flip(run / f"step_{step:08d}" / "state" / "step" / "0", 0)
    with Checkpointer(run) as checkpointer:
        with pytest.raises(CheckpointCorruptError, match=r"none of the 3 checkpoints.*leaf step"):
            checkpointer.resume(make_state(0, 1))
        with pytest.raises(CheckpointCorruptError, match="none of the 3"):
            checkpointer.latest_good()
        assert checkpointer.steps() == [100, 200, 300]


def test_empty_directory(tmp_path):
    with Checkpointer(tmp_path / "no" / "such", read_only=True) as reader:
        assert reader.steps() == []
        assert reader.latest() is None
        assert reader.latest_good() is None
        assert reader.resume({}) is None
        with pytest.raises(CheckpointNotFoundError, match="no checkpoint in"):
            reader.restore({})
    assert not (tmp_path / "no").exists()


def test_missing_step_lists_the_others(run):
    with (
        Checkpointer(run, read_only=True) as reader,
        pytest.raises(CheckpointNotFoundError, match=r"no checkpoint of step 150.*steps 100, 200, 300"),
    ):
        reader.restore({}, 150)


def test_newer_format_is_told_apart_from_damage(run):
    file = run / "step_00000300" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 3}))
    with (
        Checkpointer(run, read_only=True) as reader,
        pytest.raises(CheckpointCorruptError, match="format is 3, but this version of jaxllm reads format 2"),
    ):
        reader.manifest()


def test_a_renamed_folder_does_not_pass_for_another_step(run):
    (run / "step_00000300").rename(run / "step_00000400")
    with Checkpointer(run, read_only=True) as reader, pytest.raises(CheckpointCorruptError, match="saved as step 300"):
        reader.restore(make_state(0, 300))


def mismatch(run, target):
    with Checkpointer(run, read_only=True) as reader, pytest.raises(CheckpointMismatchError) as caught:
        reader.restore(target)
    return str(caught.value)


def test_mismatched_names(run):
    state = make_state(0, 300)
    state["params"]["blocks"]["wk"] = state["params"]["blocks"].pop("wq")
    message = mismatch(run, state)
    assert "params/blocks/wk: not in the checkpoint (closest: params/blocks/wq)" in message
    assert "params/blocks/wq: in the checkpoint, not in the state (closest: params/blocks/wk)" in message


def test_mismatched_shapes_and_dtypes(run):
    state = make_state(0, 300)
    state["params"]["embed"] = jnp.zeros((32, 16))
    state["step"] = jnp.float32(0)
    state["rng"] = jax.random.key(0, impl="rbg")
    message = mismatch(run, state)
    assert "params/embed: shape (32, 16) requested, (64, 16) saved" in message
    assert "step: dtype float32 requested, int32 saved" in message
    assert "rng: dtype key<rbg> requested, key<fry> saved" in message
    assert message.count("\n") == 4


def test_many_mismatches_are_counted(run):
    assert re.search(r"and \d+ more", mismatch(run, {f"p{i}": np.zeros(1) for i in range(20)}))


def test_mismatch_is_no_reason_to_go_back(run):
    with Checkpointer(run) as checkpointer:
        with pytest.raises(CheckpointMismatchError):
            checkpointer.resume({"other": jnp.zeros(3)})
        assert checkpointer.steps() == [100, 200, 300]


def test_abstract_mesh_and_non_arrays_as_targets(run):
    mesh = jax.make_mesh((8,), ("fsdp",))
    with Checkpointer(run, read_only=True) as reader:
        with jax.set_mesh(mesh):
            abstract = jax.eval_shape(lambda: jnp.zeros((64, 16), out_sharding=jax.P("fsdp")))
        with pytest.raises(CheckpointError, match=r"params/embed .*abstract mesh.*concrete mesh"):
            reader.restore_params(abstract, prefix="params/embed")
        with pytest.raises(CheckpointError, match=r"restore target params/embed is a str.*ShapeDtypeStruct"):
            reader.restore_params("embed", prefix="params/embed")


def test_no_unpickler_in_sight(run):
    """The formats on disk are JSON and raw arrays."""
    with Checkpointer(run, read_only=True) as reader:
        for name in reader.manifest().files:
            file = run / "step_00000300" / name
            if file.suffix == ".json" or file.name in {"_METADATA", ".zarray"}:
                json.loads(file.read_text())
            else:
                leaf = reader.manifest().leaves[name.split("/")[1].replace(".", "/")]
                itemsize = 4 if leaf.key_impl else jnp.dtype(leaf.dtype).itemsize
                extra = 2 if leaf.key_impl else 1
                assert file.stat().st_size == np.prod(leaf.shape, dtype=int) * itemsize * extra


@pytest.mark.parametrize("block", [0, 1, 4])
def test_damage_in_any_block(tmp_path, monkeypatch, block):
    """A leaf of five blocks, the last one short: every way to read what a damaged block holds finds the damage."""
    monkeypatch.setattr(leaf_hashing, "BLOCK_BYTES", 256)
    array = np.arange(130, dtype=np.float64)  # 32 elements a block, and a last one of two
    with Checkpointer(tmp_path, BLOCKING) as checkpointer:
        checkpointer.save(1, {"w": array}, {})
    flip(tmp_path / "step_00000001" / "state" / "w" / "0", 256 * block + 9)
    with Checkpointer(tmp_path, read_only=True) as reader:
        ways = {
            "restore": lambda: reader.restore({"w": array}),
            "restore as saved": reader.restore,
            "verify": reader.verify,
            "read": lambda: reader.open_leaves()["w"].read(),
            "mapped": lambda: reader.open_leaves()["w"].mapped(),
            "slice within": lambda: reader.open_leaves()["w"].read((slice(32 * block, 32 * block + 2),)),
            "slice across": lambda: reader.open_leaves()["w"].read((slice(max(0, 32 * block - 1), 32 * block + 2),)),
        }
        for name, way in ways.items():
            with pytest.raises((CheckpointCorruptError, CorruptDataError), match="do not match the hash"):
                pytest.fail(f"{name} gives {way()}")
        sound = 32 * ((block + 2) % 5)
        found = reader.open_leaves()["w"].read((slice(sound, sound + 2),))
        assert found.tolist() == [sound, sound + 1]


def test_a_leaf_hash_is_of_its_blocks_in_order(monkeypatch):
    """Beyond one block the SHA-256 of the blocks' digests in their order; of one block its own."""
    monkeypatch.setattr(leaf_hashing, "BLOCK_BYTES", 256)
    data = np.arange(130, dtype=np.float64).tobytes()
    digests = [hashlib.sha256(data[n : n + 256]).digest() for n in range(0, len(data), 256)]
    assert digests != sorted(digests)
    wanted = hashlib.sha256(b"".join(digests)).hexdigest()
    assert leaf_hashing.hash_array(np.arange(130, dtype=np.float64)) == f"blocks:{wanted}"
    assert leaf_hashing.hash_array(np.arange(32, dtype=np.float64)) == f"sha256:{digests[0].hex()}"
