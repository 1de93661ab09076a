"""Measured block sizes are read where there are any, wrong ones refused by name. ``tests.tune`` has the search."""

from __future__ import annotations

import dataclasses
import json
import tomllib

import pytest

from pallas_kernels import tuned
from pallas_kernels.flash_attention import config
from tests import environment

KIND = "TPU v9 lite"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of tuned files, beside an operation."""
    (tmp_path / "flash_attention").mkdir()
    (tmp_path / "flash_attention" / "config.py").touch()
    monkeypatch.setattr(tuned, "FOLDER", tmp_path / "tuned")
    tuned.FOLDER.mkdir()
    tuned.read.cache_clear()
    yield tuned.FOLDER
    tuned.read.cache_clear()


def write(blocks, **more):
    data = {"device_kind": KIND, "operations": {"flash_attention": {"command": "here", "blocks": blocks}}} | more
    tuned.path(KIND).write_text(json.dumps(data))


def test_what_was_measured_is_used(folder):
    default = config.tpu_blocks(KIND, 2)
    write({"2 bytes": {"rows": 4096}, "head dim 64, 2 bytes": {"q": 256}, "all": {"rows": 7}})
    assert config.tpu_blocks(KIND, 2) == dataclasses.replace(default, rows=4096)
    assert config.tpu_blocks(KIND, 4).rows != 4096
    assert config.tpu_blocks("TPU v6 lite", 2).rows != 4096
    assert config.gpu_blocks(KIND, 40, 2).q == 256 != config.gpu_blocks(KIND, 128, 2).q
    assert tuned.measured("flash_attention", KIND) == {"rows": 7}
    assert tuned.measured("grouped_matmul", KIND) == tuned.measured("flash_attention", "TPU v6 lite") == {}


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (
            {"rowz": 1024},
            r"TPU_v9_lite.json: flash_attention, 2 bytes: 'rowz' is no field of FlashTpuBlocks; legal: rows,",
        ),
        ({"rows": 1000}, r"TPU_v9_lite.json: .*: rows = 1000; it must be a power of two, at least 128"),
        ({"kv": 64}, r"kv = 64; it must be a power of two, at least 128"),
        ({"rows": "1024"}, r"rows = '1024'"),
        ({"vmem_bytes": 0}, r"vmem_bytes = 0; it must be a positive whole number"),
        ({"rows": True}, r"rows = True"),
    ],
)
def test_wrong_blocks_are_refused_by_name(folder, blocks, message):
    write({"2 bytes": blocks})
    with pytest.raises(ValueError, match=message):
        config.tpu_blocks(KIND, 2)


def test_wrong_files_are_refused_by_name(folder):
    for more, message in (
        ({"device_kind": "TPU v8"}, "TPU_v9_lite.json: device_kind is 'TPU v8'; its file is TPU_v8.json"),
        ({"tuned": 1}, "missing or unknown: tuned"),
        ({"operations": {"flush": {}}}, "no operation 'flush' has block sizes"),
        ({"operations": {"flash_attention": {"blocks": {}}}}, "flash_attention: the keys are .* unknown: command"),
    ):
        tuned.read.cache_clear()
        write({}, **more)
        with pytest.raises(ValueError, match=message):
            config.tpu_blocks(KIND, 2)


def test_files_that_are_shipped_are_right():
    """Every one of a device that was measured; none is a legal number."""
    for file in sorted(tuned.FOLDER.glob("*.json")):
        kind, operations = tuned.read(file)["device_kind"], tuned.read(file)["operations"]
        assert all(
            found["command"].startswith(("jaxllm tune", "python -m benchmarks.device")) for found in operations.values()
        )
        for item_bytes in (2, 4):
            config.tpu_blocks(kind, item_bytes)
            for head_dim in (64, 128, 256):
                config.gpu_blocks(kind, head_dim, item_bytes)
    project = tomllib.loads((environment.ROOT / "pyproject.toml").read_text())
    data = project["tool"]["setuptools"]["package-data"]
    assert "*.json" in data.get("pallas_kernels.tuned", []) or "tuned/*.json" in data.get("pallas_kernels", [])
