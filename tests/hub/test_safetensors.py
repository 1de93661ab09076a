"""Safetensors files and directories: complete, damaged and malicious."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.hub import HubError, load_hf, open_source
from jaxllm.hub.safetensors import DTYPES, INDEX, LazyTensor, open_file, open_model, write_model
from tests.hub import peers


def small() -> dict[str, np.ndarray]:
    """Tensors of every type and several shapes."""
    rng = np.random.default_rng(0)
    shapes = [(2, 3), (), (0, 4), (5,), (1, 2, 3)]
    return {
        f"tensor.{name}": rng.integers(0, 2, shapes[i % len(shapes)]).astype(dtype)
        for i, (name, dtype) in enumerate(DTYPES.items())
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a small file."""
    folder = tmp_path_factory.mktemp("small") / "model"
    write_model(folder, small(), {}, 2**30)
    return (folder / "model.safetensors").read_bytes()


def test_every_type_comes_back(tmp_path: Path) -> None:
    write_model(tmp_path / "model", small(), {}, 50)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    found = open_model(tmp_path / "model")
    assert found.keys() == small().keys()
    for name, array in small().items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def test_the_safetensors_library_reads_the_same(tmp_path: Path) -> None:
    tensors = {n: a for n, a in small().items() if a.dtype.type.__module__ == "numpy"}
    write_model(tmp_path / "model", tensors, {}, 2**30)
    theirs = peers.safetensors_of(tmp_path / "model" / "model.safetensors")
    for name, array in tensors.items():
        assert theirs[name].tobytes() == array.tobytes()


def test_what_is_made_is_made_once_and_let_go(tmp_path: Path) -> None:
    made: list[str] = []

    def make(name: str) -> np.ndarray:
        made.append(name)
        return np.full((2, 2), len(made), ml_dtypes.bfloat16)

    dtype = np.dtype(ml_dtypes.bfloat16)
    lazy = {n: LazyTensor((2, 2), dtype, lambda n=n: make(n)) for n in "cab"}
    write_model(tmp_path / "model", lazy, {"config.json": "{}"}, 2**30)
    assert made == ["a", "b", "c"]
    assert float(open_model(tmp_path / "model")["c"][0, 0]) == 3


def opened(data: bytes, file: Path) -> dict[str, np.ndarray] | None:
    """Tensors in the bytes; None where they are refused, as they must be if header and content disagree."""
    file.write_bytes(data)
    try:
        tensors = open_file(file)
    except HubError:
        return None
    for tensor in tensors.values():
        tensor.tobytes()  # every byte is there
    return tensors


def test_every_truncation_is_refused(whole: bytes, tmp_path: Path) -> None:
    assert opened(whole, tmp_path / "file") is not None
    for length in range(len(whole)):
        assert opened(whole[:length], tmp_path / "file") is None, length
    assert opened(whole + b"\0", tmp_path / "file") is None


@given(seed=st.integers(0, 2**32 - 1))
def test_damage_is_refused_or_means_something(
    whole: bytes, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / f"fuzz-{os.getpid()}"
    rng = np.random.default_rng(seed)
    header = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(40):
        data = bytearray(whole)
        for at in rng.integers(0, header, rng.integers(1, 4)):
            data[at] = rng.choice([*b'0159-{}[]",:.eE\\ \0\xff', rng.integers(256)])
        opened(bytes(data), file)


def test_a_damaged_length_is_refused(whole: bytes, tmp_path: Path) -> None:
    for length in (0, 1, 2**31, 2**62, 2**64 - 1, len(whole) - 8, len(whole) - 7):
        assert opened(length.to_bytes(8, "little") + whole[8:], tmp_path / "file") is None


def f32(*shape: Any, at: Any = (0, 4), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": at if isinstance(at, str) else list(at)}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "header is not a JSON object"),
        ("x", "header is not a JSON object"),
        (None, "header is not a JSON object"),
        ({"a": 1}, "entry for 'a' is damaged"),
        ({"a": {}}, "entry for 'a' is damaged"),
        ({"a": f32(1, dtype=3)}, "a has dtype 3; known: F64"),
        ({"a": f32(1, dtype=["F32"])}, r"a has dtype \['F32'\]"),
        ({"a": f32(1, dtype="F31")}, "a has dtype 'F31'"),
        ({"a": f32(-1)}, r"a has shape \[-1\]; legal"),
        ({"a": f32(-1, -1)}, r"a has shape \[-1, -1\]"),
        ({"a": f32(1.0)}, r"a has shape \[1.0\]"),
        ({"a": f32(True)}, r"a has shape \[True\]"),
        ({"a": f32("1")}, r"a has shape \['1'\]"),
        ({"a": f32(*[1] * 99)}, "a list of at most"),
        ({"a": f32(2**62, 2**62)}, "a has shape"),
        ({"a": f32(2**20, 2**20)}, "another number"),
        ({"a": f32(0, 2**70, at=(0, 0)), "b": f32(1)}, r"a has shape \[0, 1180591620717411303424\]"),
        ({"a": f32(1) | {"shape": 1}}, "a has shape 1"),
        ({"a": f32(1, at=(-4, 0))}, r"a has data_offsets \[-4, 0\]"),
        ({"a": f32(1, at=(4, 0))}, r"a has data_offsets \[4, 0\]"),
        ({"a": f32(1, at=(0,))}, r"a has data_offsets \[0\]"),
        ({"a": f32(1, at="04")}, "a has data_offsets 04"),
        ({"a": f32(1, at=(0.0, 4.0))}, "a has data_offsets"),
        ({"a": f32(1, at=(0, 2**64))}, "another number"),
        ({"a": f32(2, at=(0, 8))}, "is cut short: a ends at byte 8 of the data, the file has 4"),
        ({"a": f32(1), "b": f32(1)}, "b begins at byte 0 of the data and overlaps a"),
        ({"a": f32(1, dtype="U8", at=(1, 2))}, "a begins at byte 1 of the data and does not follow the header"),
        ({"a": f32(1, dtype="U8", at=(0, 1))}, "3 bytes after a belong to no tensor"),
        ({}, "4 bytes after the header belong to no tensor"),
    ],
    ids=str,
)
def test_headers_that_lie(header: Any, message: str, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)
    with pytest.raises(HubError, match=message):
        open_file(tmp_path / "file")


def test_headers_that_are_no_text(tmp_path: Path) -> None:
    for text in (b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b"NaN", b"", b"1" * 5000):
        assert opened(len(text).to_bytes(8, "little") + text + b"\0" * 4, tmp_path / "file") is None


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(HubError, match="cannot be read"):
        open_file(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../model.safetensors"}}, "shards lie beside the index, nowhere else"),
        ({"weight_map": {"a": "sub/model.safetensors"}}, "shards lie beside the index"),
        ({"weight_map": {"a": "/etc/passwd"}}, "shards lie beside the index"),
        ({"weight_map": {"a": "..\\model.safetensors"}}, "shards lie beside the index"),
        ({"weight_map": {"a": ".."}}, "shards lie beside the index"),
        ({"weight_map": {"a": ""}}, "shards lie beside the index"),
        ({"weight_map": {"a": "x\0.safetensors"}}, "shards lie beside the index"),
        ({"weight_map": {"a": 3}}, "weight_map is not an object of file names"),
        ({"weight_map": ["model.safetensors"]}, "weight_map is not an object of file names"),
        ({"weights": {}}, "is damaged: KeyError"),
        ([], "is damaged"),
        (3, "is damaged"),
        ({"weight_map": {"a": "gone.safetensors"}}, "lacks the shard gone.safetensors"),
        ({"weight_map": {"b": "model.safetensors"}}, "promises b in model.safetensors, which does not have it"),
        ({"weight_map": {"a": "again.safetensors", "c": "model.safetensors"}}, "(a|c) is in an earlier shard too"),
    ],
    ids=str,
)
def test_indexes_that_lie(index: Any, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    both = {"a": np.ones(1, np.float32), "c": np.ones(1, np.float32)}
    write_model(folder, both, {INDEX: json.dumps(index)}, 2**30)
    shutil.copy(folder / "model.safetensors", folder / "again.safetensors")
    shutil.copy(folder / "model.safetensors", tmp_path / "model.safetensors")
    with pytest.raises(HubError, match=message):
        open_model(folder)


def test_damaged_models_load_or_are_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    """Whole directories: whatever a byte of a file becomes, there is a model of finite numbers or a clear error."""
    folder = peers.peer("llama", 0).save(tmp_path / "model")
    for file in (folder / "config.json", folder / "model.safetensors"):
        data = file.read_bytes()
        for _ in range(25):
            damaged = bytearray(data)
            damaged[rng.integers(min(len(data), 400))] = rng.choice([*b'019-{}[]",:.e', rng.integers(256)])
            file.write_bytes(damaged)
            try:
                source = open_source(folder)
                if source.config.embed_dim > 999 or source.config.layers > 99 or source.config.vocab_size > 9999:
                    continue  # a model of a size that the files then do not have
                loaded = load_hf(folder)
            except HubError:
                continue
            assert all(np.isfinite(leaf).all() for leaf in np.asarray(loaded.params["embedding"]["table"]))
        file.write_bytes(data)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_values_that_are_not_finite_are_named(value: float, dtype: Any, tmp_path: Path) -> None:
    folder = peers.peer("llama", 0).save(tmp_path / "model")
    tensors = {n: np.array(a, dtype) for n, a in open_model(folder).items()}
    tensors["model.norm.weight"][1] = value
    config = (folder / "config.json").read_text()
    write_model(tmp_path / "spoilt", tensors, {"config.json": config}, 2**30)
    with pytest.raises(HubError, match="head/norm/gain holds values that are not finite"):
        load_hf(tmp_path / "spoilt")


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    folder = peers.peer("llama", 0).save(tmp_path / "model")
    tensors = dict(open_model(folder))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    config = (folder / "config.json").read_text()
    write_model(tmp_path / "whole", tensors, {"config.json": config}, 2**30)
    with pytest.raises(HubError, match=r"model.norm.weight holds int8; weights are floating point"):
        load_hf(tmp_path / "whole")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"])
def test_pickles_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    folder = peers.peer("llama", 0).save(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(HubError, match="pickle files can run any code when opened"):
        open_source(folder / name)
    if name.endswith((".bin", ".pt", ".pth")):
        with pytest.raises(HubError, match=rf"It has {name}: pickle files can run any code"):
            open_source(folder)
