"""GGUF reader: files of the gguf package, and arbitrary bytes."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.hub import HubError
from jaxllm.hub.gguf.gguf_file import Gguf, open_gguf

PLAIN = {
    "f32": np.float32,
    "f16": np.float16,
    "f64": np.float64,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
}


def write(file: Path, rng: np.random.Generator, **writing: Any) -> Path:
    """A file with an entry of every type and a tensor of every kind of shape."""
    writer = gguf.GGUFWriter(file, "llama", **writing)
    writer.add_uint8("n.u8", 200)
    writer.add_int8("n.i8", -3)
    writer.add_uint16("n.u16", 60000)
    writer.add_int16("n.i16", -30000)
    writer.add_uint32("n.u32", 1 << 31)
    writer.add_int32("n.i32", -(1 << 31))
    writer.add_uint64("n.u64", 1 << 63)
    writer.add_int64("n.i64", -(1 << 63))
    writer.add_float32("n.f32", 1e-5)
    writer.add_float64("n.f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "Ġ naïve 🙂")
    writer.add_array("texts", ["a", "żółw", "c" * 300])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, 1.5])
    writer.add_array("bools", [True, False, True])
    for name, dtype in PLAIN.items():
        writer.add_tensor(name, rng.normal(size=(3, 5)).astype(dtype))
    bf16 = rng.normal(size=(4, 2, 3)).astype(ml_dtypes.bfloat16)
    writer.add_tensor("bf16", bf16.view(np.uint8), raw_dtype=GGMLQuantizationType.BF16)
    writer.add_tensor("row", rng.normal(size=7).astype(np.float32))
    for name in ("Q8_0", "Q5_1"):
        kind = GGMLQuantizationType[name]
        blocks = gguf.quants.quantize(rng.normal(size=(6, 64)).astype(np.float32), kind)
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def file(tmp_path: Path, rng: np.random.Generator) -> Path:
    return write(tmp_path / "model.gguf", rng)


def test_metadata_and_tensors_are_those_the_reference_reads(file: Path) -> None:
    ours, theirs = open_gguf(file), gguf.GGUFReader(file)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert [type(value) for value in ours.metadata.values()] == [type(value) for value in fields.values()]
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.kind == tensor.tensor_type.name
        values = np.asarray(mine)
        assert (values.shape, values.dtype) == (mine.shape, mine.dtype)
        if tensor.name in PLAIN:
            assert values.dtype == PLAIN[tensor.name]
            assert values.tobytes() == tensor.data.tobytes()
        else:
            assert (
                values.astype(np.float32).tobytes() == gguf.quants.dequantize(tensor.data, tensor.tensor_type).tobytes()
            )


def test_rows_are_those_of_the_whole(file: Path) -> None:
    for tensor in open_gguf(file).tensors.values():
        whole = np.asarray(tensor)
        for rows in (slice(None), slice(1, 3), slice(2, None), slice(-1, None), slice(3, 1), slice(0, 100)):
            assert np.array_equal(tensor[rows], whole[rows]), (tensor.name, rows)
        with pytest.raises(IndexError, match="steps of one, not 2"):
            tensor[::2]


def test_values_come_in_the_type_asked_for(file: Path) -> None:
    tensors = open_gguf(file).tensors
    for name in ("Q8_0", "f32", "i8"):
        for dtype in (np.float64, ml_dtypes.bfloat16, np.int32):
            values = np.asarray(tensors[name], dtype)
            assert values.dtype == dtype
            assert np.array_equal(values, np.asarray(tensors[name]).astype(dtype))
    view = np.asarray(tensors["f32"])
    assert not view.flags.owndata
    assert not view.flags.writeable
    assert np.array(tensors["f32"], copy=True).flags.writeable
    with pytest.raises(ValueError, match=r"Q8_0 is Q8_0: .* cannot be a view"):
        np.array(tensors["Q8_0"], copy=False)


def test_a_quarter_of_a_million_strings_take_well_under_a_second(tmp_path: Path) -> None:
    tokens = [f"token {i}" for i in range(260_000)]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_array("tokens", tokens)
    writer.add_array("scores", list(range(260_000)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    begin = time.process_time()  # other work on the machine is none of its business
    read = open_gguf(tmp_path / "m.gguf")
    assert time.process_time() - begin < 1
    assert read.metadata["tokens"] == tokens
    assert read.metadata["scores"] == list(range(260_000))


def test_another_alignment_and_version_2(file: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    writer = gguf.GGUFWriter(tmp_path / "aligned.gguf", "llama")
    writer.add_custom_alignment(256)
    value = rng.normal(size=(3, 3)).astype(np.float32)
    writer.add_tensor("a", value)
    writer.add_tensor("b", value + 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert np.array_equal(np.asarray(open_gguf(tmp_path / "aligned.gguf").tensors["b"]), value + 1)
    data = bytearray(file.read_bytes())
    data[4] = 2
    (tmp_path / "two.gguf").write_bytes(data)
    assert open_gguf(tmp_path / "two.gguf").metadata == open_gguf(file).metadata


@pytest.fixture
def parts(tmp_path: Path, rng: np.random.Generator) -> list[Path]:
    write(tmp_path / "big.gguf", rng, split_max_tensors=4)
    found = sorted(tmp_path.glob("big-*.gguf"))
    assert [part.name[3:] for part in found] == [f"-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return found


def test_split_files_open_by_any_part(parts: list[Path]) -> None:
    every = [open_gguf(part) for part in parts]
    names = [*PLAIN, "bf16", "row", "Q8_0", "Q5_1"]
    for model in every:
        assert list(model.tensors) == names
        assert model.metadata == every[0].metadata
        assert model.metadata["text"] == "Ġ naïve 🙂"
        assert all(np.array_equal(np.asarray(t), np.asarray(every[0].tensors[n])) for n, t in model.tensors.items())


def test_missing_and_misnamed_parts_are_named(parts: list[Path]) -> None:
    alone = parts[1].rename(parts[1].with_name("alone.gguf"))
    with pytest.raises(HubError, match=r"lacks big-00002-of-00003.gguf \(1 of 3 parts missing\)"):
        open_gguf(parts[0])
    with pytest.raises(HubError, match="is one of 3 parts; keep them"):
        open_gguf(alone)
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(HubError, match=r"big-00002.* has split.no, split.count = \(2, 3\), its name says \(1, 3\)"):
        open_gguf(parts[0])
    with pytest.raises(HubError, match="part 4 of 3; there is no such part"):
        open_gguf(parts[0].with_name("big-00004-of-00003.gguf"))


def header(*, magic: bytes = b"GGUF", version: int = 3, tensors: int = 0, entries: int = 0, rest: bytes = b"") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, entries) + rest


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def tensor(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


NESTED = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5 + struct.pack("<IQ", 0, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be read|begins with b''"),
        (b"GGU", "begins with b'GGU'"),
        (b"ggml" + bytes(40), "not a GGUF file: it begins with b'ggml'"),
        (header(version=1), "GGUF version 1; versions 2 and 3 are read"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(tensors=1 << 60), "promises 1152921504606846976 tensors"),
        (header(entries=1 << 63), "promises 9223372036854775808 metadata entries"),
        (header(entries=1, rest=struct.pack("<Q", 1 << 62) + bytes(50)), "needs 4611686018427387904 bytes"),
        (header(entries=1, rest=text("k") + struct.pack("<I", 77) + bytes(9)), "k has the type 77; legal: 0 to 12"),
        (header(entries=1, rest=text(b"\xff\xfe") + bytes(20)), "not UTF-8"),
        (header(entries=1, rest=text("k") + struct.pack("<IIQ", 9, 8, 1 << 61)), "promises .* values of k"),
        (header(entries=1, rest=text("k") + struct.pack("<IIQ", 9, 4, 1 << 61)), "promises .* values of k"),
        (header(entries=1, rest=text("k") + NESTED), "nested more than 4 deep"),
        (header(entries=2, rest=(text("k") + struct.pack("<IB", 0, 1)) * 2), "entry 'k' twice"),
        (
            header(entries=1, rest=text("general.alignment") + struct.pack("<II", 4, 24)),
            "general.alignment = 24; it is a power of two",
        ),
        (header(tensors=1, rest=tensor("t", 4, kind=20) + bytes(99)), "format IQ4_NL, .*known: F32, .*Q4_0.*BF16"),
        (header(tensors=1, rest=tensor("t", 4, kind=99) + bytes(99)), "format number 99"),
        (header(tensors=1, rest=tensor("t", 1, 1, 1, 1, 1) + bytes(99)), "t has 5 dimensions; legal: 1 to 4"),
        (header(tensors=1, rest=tensor("t", 0, 1 << 63) + bytes(99)), "t has shape"),
        (header(tensors=1, rest=tensor("t", 33, kind=8) + bytes(99)), "Q8_0 has rows of a multiple of 32"),
        (header(tensors=1, rest=tensor("t", 1 << 60, 1 << 60) + bytes(99)), "cut short: t, F32"),
        (header(tensors=1, rest=tensor("t", 9) + bytes(42)), "t, F32 .9., ends at byte 100, the file has 99"),
        (header(tensors=1, rest=tensor("t", 4, offset=1 << 62) + bytes(99)), "cut short: t"),
        (header(tensors=1, rest=tensor("t", 4, offset=4) + bytes(99)), "not a multiple of 32"),
        (header(tensors=2, rest=tensor("t", 4) * 2 + bytes(99)), "tensor 't' twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(HubError, match=message) as caught:
        open_gguf(tmp_path / "bad.gguf")
    assert "bad.gguf" in str(caught.value)


def test_files_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    with pytest.raises(HubError, match=r"none.gguf cannot be read: No such file"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(HubError, match="cannot be read: Is a directory"):
        open_gguf(tmp_path)


@pytest.mark.drawn(0.3)
def test_every_truncation_is_refused(file: Path, tmp_path: Path) -> None:
    """The header is cut at every byte; the numbers, whose sizes it names, at some."""
    data = file.read_bytes()
    begin = min(t._offset for t in open_gguf(file).tensors.values())
    last = max(t._offset + t.size // t._kind.values * t._kind.layout.itemsize for t in open_gguf(file).tensors.values())
    short = tmp_path / "short.gguf"
    for length in (*range(begin), *range(begin, last, 61), last - 1):
        short.write_bytes(data[:length])
        with pytest.raises(HubError, match=r"short.gguf"):
            open_gguf(short)
    short.write_bytes(data[:last])
    open_gguf(short)


def read_all(model: Gguf) -> None:
    for name in model.tensors:
        values = np.asarray(model.tensors[name])
        assert values.shape == model.tensors[name].shape


@given(data=st.data())
def test_damaged_bytes_are_refused_or_read(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    whole = write(folder / "whole.gguf", np.random.default_rng(0)).read_bytes()
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    for attempt in range(60):
        damaged = bytearray(whole)
        for at in rng.integers(0, 1400 if attempt % 2 else len(whole), rng.integers(1, 8)):
            damaged[at] = rng.choice([0, 1, 8, 9, 127, 128, 255, rng.integers(256)])
        (folder / "damaged.gguf").write_bytes(damaged)
        try:
            model = open_gguf(folder / "damaged.gguf")
        except HubError:
            continue
        with np.errstate(all="ignore"):  # the bytes of scales may now be infinite
            read_all(model)
