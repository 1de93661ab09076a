"""Power cuts: whatever was not synced is lost or reordered; promised checkpoints and files are there."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from jaxllm import files
from jaxllm.checkpoint import CheckpointConfig, Checkpointer, checkpoint_writer
from jaxllm.data.token_files import open_tokens, write_tokens
from jaxllm.files import DataError
from jaxllm.infer.runner import executable_signature
from jaxllm.text import ByteTokenizer
from tests import environment
from tests.power_cut import PowerCut, write_tree


def state(step: int) -> dict[str, np.ndarray]:
    """Leaves of one step: small, scalar and, with the bound below, large enough to be synced alone."""
    return {"w": np.arange(300.0) + step, "step": np.int64(step)}


def test_committed_checkpoints_survive(tmp_path, monkeypatch):
    """Every checkpoint that is seen after the cut is whole, and the last one whose save returned is seen."""
    monkeypatch.setattr(checkpoint_writer, "SYNC_ALONE_BYTES", 1000)
    root = tmp_path / "disk"
    root.mkdir()
    cut = PowerCut(root, environment.seed())
    with cut.recording(), Checkpointer(root / "run", CheckpointConfig(saving="blocking", keep_last=1)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step), {"cursor": step})
            cut.mark(step)
    seen, folders = set(), (tmp_path / f"cut{n}" for n in itertools.count())
    for tree, promised in cut.states:
        with Checkpointer(write_tree(tree, next(folders)) / "run", read_only=True) as reader:
            for step in reader.steps():
                found, meta = reader.restore(None, step)
                assert found["w"].tolist() == state(step)["w"].tolist()
                assert meta == {"cursor": step}
            newest = reader.latest() or 0
            assert newest >= (promised or 0)
            seen.add((promised, newest))
    assert {(None, 0), (None, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3)} <= seen


def test_replaced_files_are_old_or_new(tmp_path):
    """`files.atomic`, which token files, compiled programs and records are written with."""
    path = tmp_path / "table.json"
    files.write_json(path, "old")
    cut = PowerCut(tmp_path, environment.seed())
    with cut.recording():
        files.write_json(path, "new" * 1000)
    found = {tree["table.json"] for tree, _ in cut.states}
    assert found == {b'"old"\n', b'"' + b"new" * 1000 + b'"\n'}


def test_token_files_are_whole_or_refused(tmp_path):
    """A file of other tokens is written over: what opens after the cut has all tokens of the one or of the other."""
    tokenizer, root = ByteTokenizer(), tmp_path / "disk"
    old, new = (tokenizer.encode_batch(texts, bos=True, eos=True) for texts in (["old", "text"], ["some new text"] * 9))
    write_tokens(root / "a.bin", iter(old), tokenizer)
    cut = PowerCut(root, environment.seed())
    with cut.recording():
        write_tokens(root / "a.bin", iter(new), tokenizer)
    seen = set()
    for number, (tree, _) in enumerate(cut.states):
        try:
            found = [
                one.tolist() for one in open_tokens(write_tree(tree, tmp_path / f"cut{number}") / "a.bin", tokenizer)
            ]
        except DataError:
            seen.add("refused")
            continue
        assert found in ([one.tolist() for one in old], [one.tolist() for one in new])
        seen.add("old" if len(found) == 2 else "new")
    assert seen == {"old", "new", "refused"}


def test_a_new_directory_is_whole(tmp_path):
    """`files.new_directory`, which exported models are written in: its name never stands for less than all of it."""
    cut = PowerCut(tmp_path, environment.seed())
    with cut.recording(), files.new_directory(tmp_path / "model") as folder:
        (folder / "inner").mkdir()
        for name in ("config.json", "inner/weights"):
            (folder / name).write_bytes(name.encode() * 50)
    cut.mark("there")
    whole = {"config.json", "inner", "inner/weights"}
    counts = {"absent": 0, "there": 0}
    for tree, promised in cut.states:
        there = {name.removeprefix("model/"): data for name, data in tree.items() if name.startswith("model/")}
        counts["there" if there else "absent"] += 1
        assert "model" in tree or promised is None
        if "model" in tree:
            assert set(there) == whole
            assert all(data == name.encode() * 50 for name, data in there.items() if data is not None)
    assert all(counts.values())


def test_the_signing_key_is_never_a_part(tmp_path, monkeypatch):
    """An empty key would sign anything: programs of a cache are native code."""
    home = tmp_path / "disk"
    home.mkdir()
    monkeypatch.setenv("JAXLLM_CACHE", str(home))
    cut = PowerCut(home, environment.seed())
    with cut.recording():
        key = executable_signature.signing_key()
    assert len(key) == 32
    assert {tree.get("engine.key", key) for tree, _ in cut.states} == {key}
    assert any("engine.key" in tree for tree, _ in cut.states)


def test_a_damaged_signing_key_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path))
    (tmp_path / "engine.key").touch(mode=0o600)
    with pytest.raises(PermissionError, match="0 bytes instead of 32"):
        executable_signature.signing_key()


def test_the_record_sees_what_is_lost(tmp_path: Path):
    """The recording file system itself: a file without fsync may be empty under its new name, a rename may be lost."""
    (tmp_path / "a").write_bytes(b"old")
    cut = PowerCut(tmp_path, 1)
    with cut.recording():
        (tmp_path / "b").write_bytes(b"new")
        (tmp_path / "b").rename(tmp_path / "a")
    found = {tree.get("a") for tree, _ in cut.states}
    assert {b"old", b""} <= found
