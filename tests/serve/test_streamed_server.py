"""A server over streamed weights whose disk or device fails: requests are answered by name, and it serves on."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import types
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm.infer import AsyncEngine, Engine
from jaxllm.infer.embedder import Embedder
from jaxllm.infer.streaming import weight_file
from jaxllm.infer.streaming.blocks import pool_store
from jaxllm.infer.streaming.blocks.cache_placement import CachePlacement
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import WeightPlacement
from jaxllm.serve import Backend, EngineBackend
from jaxllm.text import ByteTokenizer
from tests.infer import engines
from tests.infer.test_streaming import FullDevice
from tests.serve import servers

ASKED = {"model": "tiny", "prompt": "a", "max_tokens": 6, "ignore_eos": True, "temperature": 0}
CONFIG = dataclasses.replace(engines.ENGINES["roomy"], max_sequences=2)
WEIGHTS, CACHE = "weights_unavailable", "kv_cache_unavailable"


def fails(number: int) -> Callable[..., Any]:
    """Stands for a call of the operating system."""

    def failing(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return failing


def disk_fails(patch: pytest.MonkeyPatch, engine: Engine, folder: Path) -> None:
    """Reads of layers end with an error of the device."""
    patch.setattr(weight_file, "file_state", fails(errno.EIO))


def file_changes(patch: pytest.MonkeyPatch, engine: Engine, folder: Path) -> None:
    """Somebody writes to the file of a layer."""
    (file,) = folder.glob("*/layer-0001.bin")
    os.utime(file, ns=(1, 1))


def device_is_full(patch: pytest.MonkeyPatch, engine: Engine, folder: Path) -> None:
    """The device has no room for the last layer."""
    assert isinstance(engine.runner, StreamedRunner)
    window = engine.runner.window
    patch.setattr(window, "stores", {**window.stores, window.units[-1]: FullDevice()})


def cache_is_not_read(patch: pytest.MonkeyPatch, engine: Engine, folder: Path) -> None:
    """Reads of the KV cache's files end with an error of the device."""
    # Of these files alone: those of layers are read by the same call.
    patch.setattr(pool_store, "os", types.SimpleNamespace(**vars(os) | {"preadv": fails(errno.EIO)}))


def cache_is_not_written(patch: pytest.MonkeyPatch, engine: Engine, folder: Path) -> None:
    """Writes to the KV cache's files find the disk full."""
    patch.setattr(pool_store, "os", types.SimpleNamespace(**vars(os) | {"pwrite": fails(errno.ENOSPC)}))


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("damage", "code", "said"),
    [
        (disk_fails, WEIGHTS, r"layer-\d+\.bin \(layer \d\) cannot be read: .*Input/output error"),
        (file_changes, WEIGHTS, r"layer-0001\.bin \(layer 1\) was changed"),
        (device_is_full, WEIGHTS, r"layer 1 cannot be copied from the host tier .*no room for it.*smaller window"),
        (cache_is_not_read, CACHE, r"KV cache of batch 0 in layer \d .*cannot be read: .*Input/output error"),
        (cache_is_not_written, CACHE, r"KV cache of batch 0 in layer \d .*cannot be written: .*No space left"),
    ],
)
def test_a_failure_is_named_and_the_server_goes_on(damage, code, said, tmp_path):
    """Status 503 or an error in the stream; other endpoints answer; afterwards the same completions as before."""
    cache = CachePlacement(2, 0, 0, tmp_path) if code == CACHE else None
    placement = WeightPlacement(1, host_units=0, disk=tmp_path, cache=cache)
    engine = engines.build(CONFIG, "bytes", placement=placement, tokenizer=ByteTokenizer())

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Backend]:
        async with AsyncEngine(engine) as running:
            yield EngineBackend(running, None, Embedder(engine.runner.model, None, engine.max_len))

    with servers.running(opened) as (_, url), httpx.Client(base_url=url, timeout=60) as client:
        want = client.post("/v1/completions", json=ASKED).json()["choices"]
        stats = {file: file.stat() for file in tmp_path.glob("*/layer-*.bin")}
        with pytest.MonkeyPatch.context() as patch:
            damage(patch, engine, tmp_path)
            for fields in ({}, {"n": 2}, {"stream": True}):
                answer = client.post("/v1/completions", json=ASKED | fields)
                error = events(answer.text)[-1]["error"] if fields.get("stream") else answer.json()["error"]
                assert error["code"] == code
                assert re.search(said, error["message"])
                assert answer.status_code == (200 if fields.get("stream") else 503)
                assert client.get("/health").status_code == 200
            assert client.get("/v1/models").json()["data"]
        for file, stat in stats.items():
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert client.post("/v1/completions", json=ASKED).json()["choices"] == want
        if code == WEIGHTS:
            (failures,) = re.findall(r"^jaxllm:layer_read_failures_total\S* (\S+)$", client.get("/metrics").text, re.M)
            assert float(failures) >= 3
    engines.check_books(engine)
    engine.runner.close()


def events(body: str) -> list[dict[str, Any]]:
    """Events of a stream."""
    lines = (line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]
