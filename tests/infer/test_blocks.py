"""Batches by turns with their KV cache by tier: weights are read once for all, parts when they compute, errors by name.

What they serve is compared in `make proof offload ONLY=blocks_are_resident`.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.cli.errors import UsageError
from jaxllm.cli.model_loading import check_offload
from jaxllm.cli.tier_options import ServedLoad, solve_placement
from jaxllm.config import ConfigError
from jaxllm.infer import EngineConfig, SamplingParams
from jaxllm.infer.async_engine import AsyncEngine
from jaxllm.infer.embedder import Embedder
from jaxllm.infer.runner.runner_protocol import StepFailedError
from jaxllm.infer.streaming.blocks import block_runner
from jaxllm.infer.streaming.blocks.block_runner import BlockRunner, check_blocks
from jaxllm.infer.streaming.blocks.cache_placement import CachePlacement
from jaxllm.infer.streaming.blocks.pool_store import FilePools, Part
from jaxllm.infer.streaming.blocks.unit_pools import most_written, written_pages
from jaxllm.infer.streaming.fit_request import FitRequest
from jaxllm.infer.streaming.offload_budget import OffloadBudget
from jaxllm.infer.streaming.placement_fit import ModelBytes, TierLimits, fit, predict
from jaxllm.infer.streaming.step_timeline import BatchesByTurns, Tier, step_time
from jaxllm.infer.streaming.streamed_weights import WeightPlacement
from jaxllm.infer.streaming.tier_rates import TierRates
from jaxllm.infer.streaming.weight_file import CacheUnavailableError
from jaxllm.serve.backend import EngineBackend, describe
from jaxllm.text import ByteTokenizer
from tests.infer import engines

HERE: list[Tier] = ["device"] * 2
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, seed=1)
RATES = TierRates("test", (1, 8), (1.0, 2.0), (0.5, 0.5), host=200.0, disk=(50.0,))
CONFIG = dataclasses.replace(engines.ENGINES["roomy"], max_sequences=2)


def built(cache: CachePlacement, **fields: Any) -> Any:
    config = dataclasses.replace(CONFIG, **fields)
    return engines.build(config, "llama", "float32", placement=WeightPlacement(2, cache=cache))


def runner_of(engine: Any) -> BlockRunner:
    assert isinstance(engine.runner, BlockRunner)
    return engine.runner


@pytest.mark.drawn(3)
def test_weights_are_read_once_for_all_batches_and_idle_batches_read_nothing(tmp_path):
    engine = built(CachePlacement(3, 0, 0, tmp_path))
    runner, layers = runner_of(engine), engines.model_of("llama", "float32").layers
    alone = engines.serve(engine, [{"prompt": [5, 6, 7], "params": GREEDY}])
    steps, seen = engine.metrics.steps, runner.parts.counts
    assert seen.reads == {"disk": layers * steps}  # those of one batch
    most, take = [0], runner.parts.take
    shape = runner.parts.stores[Part(0, 0)].read()[0].data.shape

    def watched(part: Part) -> Any:
        """The parts that are on the device, by their arrays."""
        got = take(part)
        most[0] = max(most[0], sum(x.shape == shape for x in jax.live_arrays()))
        return got

    runner.parts.take = watched  # type: ignore[method-assign]
    together = engines.serve(engine, [{"prompt": [5, 6, 7], "params": GREEDY} for _ in range(6)])
    assert len(engine.scheduler.schedulers) == 3
    more = engine.metrics.steps - steps
    assert seen.reads["disk"] - layers * steps > 2 * layers * (more - 2)  # those of several
    read = sum(runner.window.counts.reads.values())
    assert layers * engine.metrics.steps <= read <= layers * engine.metrics.steps + 2
    assert {tuple(r.sequences[0].tokens) for r in [*alone, *together]} == {tuple(alone[0].sequences[0].tokens)}
    assert not list(tmp_path.iterdir())  # files have no names
    found = runner.counters()
    assert found["kv_reads_disk"] == seen.reads["disk"]
    assert found["kv_read_bytes_disk"] == found["kv_reads_disk"] * sum(
        x.nbytes for x in runner.parts.stores[Part(0, 0)].read()[0] if x is not None
    )
    assert most[0] == 2
    runner.close()


@pytest.mark.drawn(3)
def test_a_server_shows_it_and_pages_are_not_those_of_another_placement(tmp_path):
    """By default there are pages for all sequences at full length; a folder of programs keeps no other number."""
    config = dataclasses.replace(CONFIG, pages=None, samplers=("plain",), speculate="ngram", verify_tokens=2)

    def make(cache: CachePlacement | None) -> Any:
        placement = WeightPlacement(2, cache=cache)
        return engines.build(
            config, "llama", "float32", placement=placement, manifest=tmp_path / "programs", tokenizer=ByteTokenizer()
        )

    engine = make(CachePlacement(3, 0, None))
    runner = runner_of(engine)
    spec = runner.spec
    assert spec.pages[0] == CONFIG.max_sequences * spec.columns + 1
    backend = EngineBackend(AsyncEngine(engine), None, Embedder(runner.model, runner.params, runner.spec.max_len))
    assert backend.max_sequences == 3 * CONFIG.max_sequences
    served = engines.serve(engine, [{"prompt": [5, 6, 5, 6, 5], "params": GREEDY} for _ in range(4)])
    load, said = backend.load(), describe(engine)
    assert load.counters["kv_reads_host"] > 0
    assert load.counters["layer_reads_host"] > 0
    each = spec.pages[0] * engine.runner.token_bytes * spec.page_size
    assert said["cache"]["host_bytes"] == 3 * each
    assert (said["cache"]["bytes"], said["cache"]["batches"]) == (0, 3)
    again = make(None)
    assert again.runner.spec.pages[0] != spec.pages[0]
    other = engines.serve(again, [{"prompt": [5, 6, 5, 6, 5], "params": GREEDY}])
    assert {tuple(r.sequences[0].tokens) for r in served} == {tuple(other[0].sequences[0].tokens)}
    few = make(CachePlacement(2, 0, None, tokens=spec.max_len))
    assert few.runner.spec.pages[0] == spec.columns + 1
    for one in (engine, again, few):
        one.runner.close()


@pytest.mark.drawn(2)
def test_a_part_that_cannot_be_written_ends_the_requests_of_a_following_step(tmp_path, monkeypatch):
    engine = built(CachePlacement(2, 0, 0, tmp_path))
    serve = [{"prompt": [5, 6, 7], "params": GREEDY}]
    want = [one.sequences[0].tokens for one in engines.serve(engine, serve)]
    real = os.pwrite

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    request, ended = engine.submit([1, 2, 3], GREEDY), []
    while not ended:
        ended = [delta for delta in engine.step() if delta.finish is not None]
    assert re.search(r"KV cache of batch \d in layer \d.*cannot be written: .*No space left", str(request.failure))
    assert isinstance(request.failure, StepFailedError)
    assert request.failure.code == "kv_cache_unavailable"
    monkeypatch.setattr(os, "pwrite", real)
    assert [one.sequences[0].tokens for one in engines.serve(engine, serve)] == want
    runner_of(engine).close()


def test_there_has_to_be_memory_for_all_parts(monkeypatch):
    monkeypatch.setattr(block_runner, "free_host_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"KV cache of 2 batches takes .* of the host's memory.*kv_tokens"):
        built(CachePlacement(2, 0))


@pytest.mark.drawn(3)
def test_a_part_that_cannot_be_read_ends_the_requests_of_its_step(tmp_path, monkeypatch):
    """By name; the engine goes on, and says what it said before."""
    engine = built(CachePlacement(2, 0, 0, tmp_path))
    serve = [{"prompt": [5, 6, 7], "params": GREEDY}, {"prompt": [8, 9], "params": GREEDY}]
    want = [one.sequences[0].tokens for one in engines.serve(engine, serve)]
    real = os.preadv

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    request, ended = engine.submit([1, 2, 3], GREEDY), []
    while not ended:
        ended = [delta for delta in engine.step() if delta.finish is not None]
    assert isinstance(request.failure, StepFailedError)
    assert re.search(r"KV cache of batch \d in layer \d.*cannot be read: .*Check the disk", str(request.failure))
    assert request.failure.code == "kv_cache_unavailable"
    monkeypatch.setattr(os, "preadv", real)
    again = engines.serve(engine, serve)
    assert [one.sequences[0].tokens for one in again] == want
    runner_of(engine).close()


def test_files_have_their_size_from_the_start(tmp_path, monkeypatch):
    """A full disk is an error before anything is served."""
    template = (np.zeros((2, 5, 1, 4, 3), np.float32),)
    pools = FilePools(template, tmp_path, "the KV cache of batch 0 in layer 1")
    content = np.arange(2 * 3 * 12, dtype=np.float32).reshape(2, 3, 1, 4, 3)
    pools.write([np.asarray([4, 0])], (content,))
    (found,) = pools.read()
    assert np.array_equal(found[:, [4, 0]], content[:, :2])
    assert not found[:, 1:4].any()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CacheUnavailableError, match=r"batch 0 in layer 1 cannot be kept there.*Give a directory"):
        FilePools(template, tmp_path, "the KV cache of batch 0 in layer 1")
    with pytest.raises(CacheUnavailableError, match="cannot be kept there"):
        FilePools(template, Path("/dev/null/kv"), "the KV cache")


def test_written_pages_are_those_of_the_tokens_and_of_copies():
    """By hand: 6 rows of a sequence of 9 tokens, one row of another that begins a page, and a copy."""
    engine = built(CachePlacement(2))
    shape = runner_of(engine).shape(CONFIG.max_batched_tokens, decode=False, full=False)
    packed = np.zeros(shape.inputs.size, np.int32)
    x = shape.inputs.views(packed)
    x["tables"][0, :2, :4] = [[7, 8, 9, 3], [1, 2, 0, 0]]
    x["kv_lens"][:2], x["starts"][:] = [9, 5], [0, 6, *[7] * (len(x["starts"]) - 2)]
    x["copies"][0, :2], x["copied"][0] = [[1, 6], [1, 5]], 1
    assert written_pages(shape, packed, 4)[0].tolist() == [2, 6, 7, 8, 9]
    assert most_written(shape, 4, 1000) == min(shape.tokens, shape.tokens // 4 + 2 * shape.requests) + shape.requests
    assert most_written(shape, 4, 3) == 3
    runner_of(engine).close()


def test_a_step_of_a_block_by_hand():
    """Two units of 0.5 s in each batch, and parts of 40 bytes that take 0.2 s from the host, 1 s from the disk."""
    units = (100, 100)
    turns = BatchesByTurns(2, ("device",) * 4, 40, 0, 2)
    assert step_time(HERE, units, RATES, 1, 2, 2, turns).seconds == pytest.approx(2 * 1.5)
    hidden = dataclasses.replace(turns, parts=("host",) * 4)  # all but the first part of the step
    assert step_time(HERE, units, RATES, 1, 2, 2, hidden).seconds == pytest.approx(3.0 + 0.2)
    # One at a time: a part is read when the one before has computed.
    serial = dataclasses.replace(hidden, window=1)
    assert step_time(HERE, units, RATES, 1, 2, 2, serial).seconds == pytest.approx(3.0 + 4 * 0.2)
    # Reads of 0.8 s from the disk and copies of 0.2 s, one after the other; the last part computes when it is there.
    slow = dataclasses.replace(turns, parts=("disk",) * 4)
    assert step_time(HERE, units, RATES, 1, 2, 2, slow).seconds == pytest.approx(4 * 1.0 + 0.5 + 2 * 0.5)
    streams = dataclasses.replace(turns, stream_bytes=20)
    assert step_time(HERE, units, RATES, 1, 2, 2, streams).seconds == pytest.approx(3.0 + 4 * 0.1)


def test_blocks_pay_where_reading_weights_is_the_limit(capsys, tmp_path):
    """Four batches share a read of all layers, though their KV cache has no room on the device."""
    model = ModelBytes((100,) * 10, 50, 1, stream=1)
    rates = TierRates("test", (1, 8), (0.1, 0.2), (0.05, 0.05), host=200.0, disk=(50.0,))
    limits = TierLimits(device=400, host=4000, length=30, page=10)
    (alone,) = fit(model, rates, limits, [4])
    (block,) = fit(model, rates, dataclasses.replace(limits, batches=4), [4])
    assert (alone.budget.batches, block.budget.batches) == (1, 4)
    assert alone.limit == block.limit == "copies from the host"
    assert block.cache["host"] > 0
    assert 2 < block.tokens_per_second / alone.tokens_per_second <= 4
    assert predict(model, rates, block.budget, 4, 30, 10) == block
    assert block.budget.kv_tokens == 4 * 30
    wide = fit(model, rates, dataclasses.replace(limits, batches=4, page=16), [4])[0]
    assert wide.budget.kv_tokens == 4 * 32, "whole pages for each sequence"
    rates.write(file := tmp_path / "rates.json")
    budget = solve_placement(FitRequest(400, 4000, None, file, length=30, batches=4), model, ServedLoad(4))
    said = capsys.readouterr().err
    assert budget.batches == 4
    assert "KV host" in said
    assert OffloadBudget.parse(str(budget)) == budget
    of_adapters = dataclasses.replace(model, adapter_rank=10)
    with pytest.raises(UsageError, match="no placement fits"):
        solve_placement(
            FitRequest(400, 4000, None, file, length=30, batches=4), of_adapters, ServedLoad(4, adapter_ranks=40)
        )
    assert FitRequest.parse("fit,batches=8").batches == 8  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="leave it out, or batches"):
        FitRequest.parse("fit,batches=8,prompt=4")
    with pytest.raises(UsageError, match="batches by turns and a KV cache by tier are for one device"):
        check_offload("batches=2", "tensor=4")
    with pytest.raises(UsageError, match="give a budget without slices"):
        check_offload("window=1,experts=2,slices=4", None, adapters=True)
    with pytest.raises(ValueError, match="fit finds that"):
        FitRequest.parse("fit,kv_device=1GiB")


def test_budgets_and_what_does_not_go_together(tmp_path):
    budget = OffloadBudget.parse("window=3,batches=4,kv_device=1MiB,kv_host=2MiB,disk=d,streams=host,kv_tokens=9")
    assert budget.cache == CachePlacement(4, 1 << 20, 2 << 20, Path("d"), "host", tokens=9)
    assert str(budget.cache) == (
        "4 batches by turns, KV cache 1 MiB on the device, 2 MiB on the host, the rest in files, streams on the host"
    )
    assert budget.placement([10, 10]).cache == budget.cache
    assert OffloadBudget.parse(str(budget)) == budget
    assert OffloadBudget.parse("window=3").cache is None
    for text, said in (
        ("kv_host=1MiB,disk=d", "give kv_device"),
        ("kv_device=0B,kv_host=1MiB", "disk=DIR"),
        ("experts=2,batches=2", "experts in slots"),
        ("kv_limit=1GiB,batches=2", "give kv_tokens"),
        ("streams=disk", "no part"),
        ("batches=0", "no part"),
    ):
        with pytest.raises(ValueError, match=said):
            OffloadBudget.parse(text)
    for fields in ({"batches": 0}, {"window": 0}, {"device_bytes": -1}):
        with pytest.raises(ValueError, match="placement of the KV cache"):
            CachePlacement(**fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give a directory"):
        CachePlacement(host_bytes=1)
    placement = WeightPlacement(2, cache=CachePlacement(2))
    invariant = {"preemption": "swap", "batch_invariant": True, "samplers": ("full",), "decode_steps": 1}
    for fields, said in (
        ({"preemption": "swap"}, "give 'recompute'"),
        (invariant, "batch_invariant, which needs"),
        ({"kv_dtype": "kivi4"}, "encodes whole pages"),
        ({"retention": "window+sinks"}, "retention"),
        ({"kv_host_gib": 1.0}, "kv_host_gib"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_blocks(EngineConfig(layer_window=2, **fields), placement)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="experts in slots"):
        check_blocks(EngineConfig(layer_window=2), dataclasses.replace(placement, expert_slots=2))
