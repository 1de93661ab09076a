"""Streamed weights: what is served is what resident weights give, wherever the layers are and however few at a time."""

from __future__ import annotations

import dataclasses
import os
import re
import weakref
from collections import Counter
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.cli.errors import is_user_error
from jaxllm.hub import find_model, open_source
from jaxllm.hub.families.config_json import config_json
from jaxllm.hub.huggingface import HubModel, export_hf
from jaxllm.infer import EngineConfig, SamplingParams
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.runner.model_runner import ModelRunner
from jaxllm.infer.runner.runner_protocol import StepFailedError
from jaxllm.infer.streaming import layer_store, pinned_memory
from jaxllm.infer.streaming.abstract_streamed import AbstractStreamedRunner
from jaxllm.infer.streaming.experts import expert_stage
from jaxllm.infer.streaming.experts.expert_slots import ExpertSlots
from jaxllm.infer.streaming.experts.host_experts import HostExperts
from jaxllm.infer.streaming.layer_store import HostLayers, LoadedLayers
from jaxllm.infer.streaming.offload_budget import OffloadBudget
from jaxllm.infer.streaming.open_streamed import open_streamed
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import StreamedWeights, WeightPlacement, spread
from jaxllm.infer.streaming.weight_file import WeightsUnavailableError
from jaxllm.models import functional
from jaxllm.quant.packing import pack_params
from jaxllm.train import train
from sharding import MeshSpec
from tests import quick
from tests.infer import adapters, engines
from tests.train.runs import run_config

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, seed=1, logprobs=2)


def placed(where: str, folder: Path, window: int = 2) -> WeightPlacement:
    """A placement by name."""
    return {
        "host": WeightPlacement(window),
        "files": WeightPlacement(window, host_units=0, disk=folder),
        "mixed": WeightPlacement(window, device_units=1, host_units=1, disk=folder, loaders=3),
        "device": WeightPlacement(window, device_units=99),
    }[where]


def runner_of(engine: Any) -> StreamedRunner:
    assert isinstance(engine.runner, StreamedRunner)
    return engine.runner


class FullDevice:
    """Store of a unit for which the device has no room."""

    tier = "host"

    def read(self, unit: Any, device: jax.Device) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room for it")


class CountingLayers:
    """Counts how often each unit of a store is read."""

    tier = "source"

    def __init__(self, store: LoadedLayers):
        self.store, self.reads = store, Counter[Any]()

    def read(self, unit: Any, device: jax.Device) -> Any:
        self.reads[unit] += 1
        return self.store.read(unit, device)


def raise_interrupt(_: Any) -> Any:
    raise KeyboardInterrupt


def run_steps(engine: Any, many: int) -> None:
    for _ in range(many):
        engine.step()


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize(
    ("model", "where", "window", "way"),
    [
        ("llama", "host", 1, "tight, recompute"),
        ("gemma3", "files", 2, "tight, swap"),
        ("deepseek_v3", "mixed", 1, "roomy"),
        ("mixtral", "files", 3, "layers apart"),
        ("gpt_oss", "mixed", 2, "contiguous"),
    ],
)
def test_completions_are_those_of_resident_weights(model, where, window, way, rng, float64, tmp_path):
    """Chunked prefill, prefix cache, preemption, several families. All: `make proof streamed_weights`."""
    config = engines.ENGINES[way]
    engine = engines.build(config, model, "float64", placement=placed(where, tmp_path, window))
    made = engines.serve(engine, engines.traffic(rng, config, 5))
    assert engines.error(model, "float64", made) <= 1e-12
    counts = runner_of(engine).window.counts
    assert counts.most <= window
    assert counts.units % engines.model_of(model, "float64").layers == 0 or model in ("gemma3", "gpt_oss")
    assert engine.runner.program_cache is not None
    assert engine.runner.program_cache.counts.late == 0


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize(
    ("model", "slots", "eviction", "where"),
    [
        ("mixtral", 1, "lru", "device"),
        ("mixtral", 3, "score", "host"),
        ("gpt_oss", 2, "lru", "files"),
        ("deepseek_v3", 2, "score", "device"),
        ("deepseek_v3", 6, "lru", "mixed"),
    ],
)
def test_experts_in_slots_are_resident_experts(model, slots, eviction, where, rng, float64, tmp_path):
    """Any number of slots serves the same; experts that are there are not loaded again."""
    config = engines.ENGINES["tight, recompute"]
    placement = dataclasses.replace(placed(where, tmp_path), expert_slots=slots, eviction=eviction)
    engine = engines.build(config, model, "float64", placement=placement)
    made = engines.serve(engine, engines.traffic(rng, config, 4))
    assert engines.error(model, "float64", made) <= 1e-12
    stage = runner_of(engine).experts
    assert stage is not None
    counts, held = stage.counts, next(iter(stage.slots.values()))
    assert counts.loads == counts.wanted - counts.hits + counts.predicted
    assert 0 < counts.hit_rate <= 1 or slots == 1
    if slots == len(held.table):
        assert counts.loads <= sum(len(one.table) for one in stage.slots.values())
    assert engine.runner.program_cache is not None
    assert engine.runner.program_cache.counts.late == 0


def test_what_pinned_memory_has_no_room_for_stays_where_it_is(monkeypatch, float64):
    """With a warning that names the limit; what is served is the same."""
    put, asked = jax.device_put, Counter[str]()

    def refusing(tree, place=None, **more):
        if getattr(place, "memory_kind", None) == "pinned_host":
            asked["pinned"] += 1
            if asked["pinned"] > 1:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory")
        return put(tree, place, **more)

    monkeypatch.setattr(pinned_memory.jax, "device_put", refusing)
    monkeypatch.setattr(layer_store, "can_pin", pinned_memory.has_kinds)
    config, serve = engines.ENGINES["roomy"], [{"prompt": [5, 6, 7], "params": GREEDY}]
    with pytest.warns(UserWarning, match="XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"):
        engine = engines.build(config, "llama", "float64", placement=WeightPlacement(2))
    kinds = Counter(
        isinstance(jax.tree.leaves(store._units[unit])[0], np.ndarray)
        for unit, store in runner_of(engine).window.stores.items()
    )
    assert kinds == {False: 1, True: len(runner_of(engine).units) - 1}
    assert engines.error("llama", "float64", engines.serve(engine, serve)) <= 1e-12


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("model", "slots"), [("llama", 0), ("mixtral", 2)])
def test_pinned_layers_and_experts_are_the_same(model, slots, rng, float64, monkeypatch):
    """As on an accelerator: layers and experts wait in pinned memory, and what computes is in the device's own."""
    assert not pinned_memory.can_pin(jax.devices()[0])
    assert pinned_memory.has_kinds(jax.devices()[0])
    monkeypatch.setattr(layer_store, "can_pin", pinned_memory.has_kinds)
    monkeypatch.setattr(expert_stage, "can_pin", pinned_memory.has_kinds)
    config = engines.ENGINES["tight, recompute"]
    engine = engines.build(config, model, "float64", placement=WeightPlacement(2, expert_slots=slots))
    runner, kinds = runner_of(engine), Counter[str]()
    for unit in runner.units:
        store = runner.window.stores[unit]
        assert isinstance(store, HostLayers)
        kinds.update(x.sharding.memory_kind for x in jax.tree.leaves(store._units[unit]))
        read = store.read(unit, jax.devices()[0])
        assert {x.sharding.memory_kind for x in jax.tree.leaves(read)} == {"device"}
    if slots:
        assert runner.experts is not None
        for own in runner.experts._experts.values():
            assert isinstance(own, HostExperts)
            kinds.update(x.sharding.memory_kind for x in jax.tree.leaves(own.each))
        buffers = jax.tree.leaves(runner.experts._buffers)
        assert {x.sharding.memory_kind for x in buffers} == {"device"}
    assert set(kinds) == {"pinned_host"}
    made = engines.serve(engine, engines.traffic(rng, config, 4))
    assert engines.error(model, "float64", made) <= 1e-12
    if runner.experts is not None:
        assert {x.sharding.memory_kind for x in jax.tree.leaves(runner.experts._buffers)} == {"device"}
    assert engine.runner.program_cache is not None
    assert engine.runner.program_cache.counts.late == 0


def test_experts_leave_by_use_or_by_score():
    slots = ExpertSlots(5, 2)
    assert [(some, loads) for some, loads in slots.rounds([4, 1])] == [([4, 1], [(4, 0), (1, 1)])]
    assert list(slots.rounds([1])) == [([1], [])]
    assert list(slots.rounds([1, 3])) == [([1], []), ([3], [(3, 0)])]  # 4 was used longest ago
    assert [some for some, _ in slots.rounds([0, 1, 2])] == [[1], [0, 2]]
    assert slots.table.tolist() == [0, 2, 1, 2, 2] or slots.table.tolist() == [1, 2, 0, 2, 2]
    scored = ExpertSlots(4, 2, "score")
    list(scored.rounds([0, 1]))
    scored.see(np.asarray([0.6, 0.1, 0.2, 0.1]))
    assert list(scored.rounds([2])) == [([2], [(2, 1)])]  # 1 has the lower score, though both were used at once
    assert scored.ahead(2, keep=[2]) is None
    assert scored.ahead(3, keep=[3, 0]) == 1
    for many in (5, 0):
        with pytest.raises(ValueError, match=f"expert slots = {many}"):
            ExpertSlots(4, many)


@pytest.mark.parametrize("where", ["device", "host", "files", "mixed"])
def test_units_with_experts_are_read_once(where, tmp_path):
    """Their experts and the rest of them come from one reading, wherever the rest goes."""
    counting = CountingLayers(LoadedLayers(engines.params_of("mixtral", "float32")))
    model = engines.functional(engines.model_of("mixtral", "float32"))
    placement = dataclasses.replace(placed(where, tmp_path), expert_slots=2)
    weights = StreamedWeights.of(model, {}, counting, placement)
    window = weights.window(jax.devices()[0])
    assert counting.reads == dict.fromkeys(weights.units, 1)
    assert len(weights.experts) == len(weights.units)
    window.close()


@pytest.mark.parametrize("experts_in", ["host", "files"])
def test_a_start_holds_no_more_units_than_it_places(experts_in, tmp_path):
    """With experts in slots each unit is written before the next ones are read; one is kept for its structure."""
    config = dataclasses.replace(engines.model_of("mixtral", "float32"), layers=6)
    params, held, most = quick.params(config), list[Any](), [0]

    class Watched:
        tier = "source"

        def read(self, unit: Any, device: jax.Device) -> Any:
            most[0] = max(most[0], sum(one() is not None for one in held))
            tree = jax.tree.map(np.array, LoadedLayers(params).read(unit, device))
            held.append(weakref.ref(jax.tree.leaves(tree["0"]["attention"])[0]))
            return tree

    model = functional(config)
    placement = dataclasses.replace(
        placed("files", tmp_path), expert_slots=2, expert_host_bytes=None if experts_in == "host" else 0
    )
    weights = StreamedWeights.of(model, {}, Watched(), placement)
    assert len(held) == len(weights.units) == 6
    assert most[0] <= 2


@pytest.mark.drawn(3)
def test_files_are_found_again(tmp_path, float64):
    """Files of the same model are not written twice; those that somebody changed are."""
    placement = placed("files", tmp_path)
    serve = [{"prompt": [5, 6, 7], "params": GREEDY}]
    first = engines.build(engines.ENGINES["roomy"], "llama", "float64", placement=placement)
    want = engines.serve(first, serve)
    files = sorted(tmp_path.glob("*/layer-*.bin"))
    assert len(files) == engines.model_of("llama", "float64").layers
    before = [file.stat().st_mtime_ns for file in files]
    files[0].write_bytes(files[0].read_bytes()[:-1])
    second = engines.build(engines.ENGINES["roomy"], "llama", "float64", placement=placement)
    assert [file.stat().st_mtime_ns == old for file, old in zip(files, before, strict=True)] == [
        False,
        *[True] * (len(files) - 1),
    ]
    assert [r.sequences[0].tokens for r in engines.serve(second, serve)] == [r.sequences[0].tokens for r in want]


@pytest.mark.parametrize("of", ["model", "run"])
def test_files_within_the_models_folder_are_found_again(of, tmp_path):
    """A folder of layers in that of the model or the run is no change of the model; one of its weights is."""
    if of == "model":
        folder = tmp_path / "model"
        config = dataclasses.replace(engines.model_of("llama", "float32"), vocab_size=49152)
        export_hf(HubModel(config, quick.params(config), config_json(config, 64)), folder)
        open_source(find_model("smollm2")).tokenizer.save(folder)
        weights = folder / "model.safetensors"
    else:
        folder = train(run_config(tmp_path, steps=2, every=2)).directory
        weights = next(file for file in folder.glob("checkpoints/step_00000002/**/*") if file.is_file())
    budget = OffloadBudget.parse(f"window=1,host=0B,disk={folder / 'layers'}")

    def folders() -> set[str]:
        open_streamed(folder, budget)
        return {path.name for path in (folder / "layers").iterdir()}

    first = folders()
    assert len(first) == 1
    assert folders() == first
    later = weights.stat().st_mtime_ns + 10**9
    os.utime(weights, ns=(later, later))
    assert len(folders()) == 2


@pytest.mark.drawn(3)
@pytest.mark.parametrize("damage", ["changed", "bits", "removed"])
@pytest.mark.parametrize("way", ["roomy", "tight, swap"])
def test_a_failed_read_ends_the_requests_of_its_step(damage, way, tmp_path, float64):
    """By name; the engine goes on, and says what it said before when the file is there again."""
    config = dataclasses.replace(engines.ENGINES[way], max_sequences=2)
    engine = engines.build(config, "llama", "float64", placement=placed("files", tmp_path, 2))
    prompts = [list(range(1, 14)), [5, 6, 7], [8, 9, 1, 2]]
    serve = [{"prompt": prompt, "params": GREEDY} for prompt in prompts]
    want = [request.sequences[0].tokens for request in engines.serve(engine, serve)]
    file = sorted(tmp_path.glob("*/layer-*.bin"))[1]
    good, stat = file.read_bytes(), file.stat()
    wait([future for _, future in runner_of(engine).window._ahead])  # no thread reads while the file changes
    if damage == "removed":
        file.unlink()
    elif damage == "changed":
        file.write_bytes(b"x" * len(good))
    else:
        flipped = bytearray(good)
        flipped[20] ^= 4
        file.write_bytes(flipped)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        runner_of(engine).window.stores[runner_of(engine).window.units[1]]._checked.clear()  # type: ignore[attr-defined]
    runner_of(engine).window.restart()  # the first step fails, and not one after it
    said = {"changed": "was changed", "bits": "checksum differs", "removed": "cannot be read"}[damage]
    # Of another salt, so that pages of the first time are not found.
    requests, ended = [engine.submit(prompt, GREEDY, salt="new") for prompt in prompts], []
    while not ended:
        ended = [delta for delta in engine.step() if delta.finish is not None]
    assert {delta.finish for delta in ended} == {"error"}
    failed = [n for n, request in enumerate(requests) if request.failure is not None]
    assert failed == ([0, 1] if way == "roomy" else [0])  # where the first prompt fills the step
    for n in failed:
        assert isinstance(requests[n].failure, StepFailedError)
        assert re.search(rf"{file.name} \(layer 1\).*{said}", str(requests[n].failure))
    file.write_bytes(good)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    # Others waited meanwhile. Nothing of the step is found in the prefix cache.
    again = [engine.submit(prompt, GREEDY, salt="new") for prompt in prompts]
    while engine.busy:
        engine.step()
    assert runner_of(engine).counters()["layer_read_failures"] >= 2  # ahead, and when it was needed
    assert [request.sequences[0].tokens for request in again] == want
    for n in set(range(3)).difference(failed):
        assert (requests[n].failure, requests[n].sequences[0].tokens) == (None, want[n])
    assert runner_of(engine).window.counts.most <= 2


def test_requests_fail_while_the_engine_decodes_and_others_go_on(tmp_path, float64):
    """A read fails in a later step, with a step in flight: its sequences end, a queued one is served."""
    config = dataclasses.replace(engines.ENGINES["roomy"], max_sequences=1)
    engine = engines.build(config, "llama", "float64", placement=placed("host", tmp_path, 1))
    window = runner_of(engine).window
    serve = [{"prompt": [5, 6, 7], "params": GREEDY}]
    want = engines.serve(engine, serve)[0].sequences[0].tokens
    failing, waiting = (engine.submit([5, 6, 7], GREEDY) for _ in range(2))
    run_steps(engine, 4)
    store = window.stores[window.units[-1]]
    window.stores = {**window.stores, window.units[-1]: FullDevice()}  # type: ignore[dict-item]
    while failing.sequences[0].finish is None:
        engine.step()
    assert failing.sequences[0].finish == "error"
    assert "no room for it" in str(failing.failure)
    assert str(window.units[-1].first) in str(failing.failure)
    assert failing.sequences[0].tokens == want[: len(failing.sequences[0].tokens)]
    window.stores = {**window.stores, window.units[-1]: store}
    while engine.busy:
        engine.step()
    assert waiting.failure is None
    assert waiting.sequences[0].tokens == want


def test_layers_that_stay_need_room():
    """The first layer is read for its shapes, the others to stay: either fails by name, as the user's to mend."""
    model = functional(engines.model_of("llama", "float32"))
    params = model.init(jax.random.key(0))
    ends = {name: value for name, value in params.items() if name != "segments"}
    layers = LoadedLayers(params)
    for full in (0, 1):
        weights = StreamedWeights.of(model, ends, layers, WeightPlacement(device_units=2))
        unit = weights.units[full]
        weights = dataclasses.replace(weights, stores={**weights.stores, unit: FullDevice()})  # type: ignore[dict-item]
        with pytest.raises(WeightsUnavailableError, match=f"layer {unit.first} cannot be copied.*no room") as caught:
            Engine.of(model, weights, dataclasses.replace(engines.ENGINES["roomy"], layer_window=2), strict=True)
        assert is_user_error(caught.value)


def test_a_read_that_failed_ahead_of_its_use_is_tried_again(tmp_path):
    """The first layer of the next step is read when a step ends, which may be long before that step."""
    engine = engines.build(engines.ENGINES["roomy"], placement=placed("host", tmp_path, 1))
    window = runner_of(engine).window
    serve = [{"prompt": [5, 6, 7], "params": GREEDY}]
    want = engines.serve(engine, serve)[0].sequences[0].tokens
    first = window.units[0]
    store = window.stores[first]
    wait([future for _, future in window._ahead])  # else the read that is under way fails too
    window.stores = {**window.stores, first: FullDevice()}  # type: ignore[dict-item]
    window.restart()
    wait([future for _, future in window._ahead])
    window.stores = {**window.stores, first: store}
    again = engines.serve(engine, serve)[0]
    assert (again.failure, again.sequences[0].tokens) == (None, want)
    assert window.counts.failures == 1


def test_a_step_broken_off_by_anything_else_ends_the_engine(tmp_path, monkeypatch):
    engine = engines.build(engines.ENGINES["roomy"], placement=placed("host", tmp_path))
    runner = runner_of(engine)
    with monkeypatch.context() as patch:
        patch.setattr(runner.window, "take", raise_interrupt)
        request = engine.submit([5, 6, 7], GREEDY)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.cancel(request)
    engine.submit([5, 6, 7], GREEDY)
    with pytest.raises(RuntimeError, match="broken off"):
        engine.step()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("model", ["llama", "deep gemma2"])
def test_requests_have_adapters_of_their_own(model, float64):
    """Two adapters by turns in one slot, and the base: each request gets what its merged model says. The layers of one
    model are alike, those of the other make three groups of two, and one more.
    """
    config = dataclasses.replace(engines.ENGINES["roomy"], adapter_slots=1)
    engine = engines.build(config, model, "float64", placement=WeightPlacement(1, 1))
    for n in range(2):
        engine.adapters.add(f"a{n}", adapters.drawn(model, n, 4))
    asked: list[Any] = ["a0", None, "a1", "a0"]
    made = engines.serve(engine, [{"prompt": [5, 6, 7, 8], "params": GREEDY, "adapter": name} for name in asked])
    assert engine.adapter_slots is not None
    assert engine.adapter_slots.evictions > 0
    for name, request in zip(asked, made, strict=True):
        params = None if name is None else adapters.merged(model, "float64", int(name[1:]), 4)
        assert engines.error(model, "float64", [request], params) < 1e-10
    assert len({tuple(one.sequences[0].tokens) for one in made}) == 3
    runner_of(engine).close()


@pytest.mark.drawn(2)
def test_packed_layers_have_adapters_too():
    """Tokens and log-probabilities of an engine whose packed layers stay on the device."""
    config = dataclasses.replace(engines.ENGINES["roomy"], adapter_slots=1)
    params = pack_params(
        engines.functional(engines.model_of("llama", "float32")), engines.params_of("llama", "float32"), "int8"
    )
    said = []
    for placement in (None, WeightPlacement(1, 1)):
        engine = engines.build(config, "llama", params=params, placement=placement)
        engine.adapters.add("a", adapters.drawn("llama", 0, 4))
        asked: list[Any] = ["a", None]
        made = engines.serve(engine, [{"prompt": [5, 6, 7], "params": GREEDY, "adapter": name} for name in asked])
        said.append([one.sequences[0] for one in made])
    for one, other in zip(*said, strict=True):
        assert one.tokens == other.tokens
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert said[0][0].tokens != said[0][1].tokens


def test_a_folder_of_programs_keeps_pages_for_one_placement():
    """More layers on the device leave room for fewer pages."""
    made = [engines.build(engines.ENGINES["roomy"], placement=WeightPlacement(1, here)) for here in (0, 1)]
    assert runner_of(made[0])._page_key != runner_of(made[1])._page_key
    for engine in made:
        runner_of(engine).close()


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("model", "slots"), [("llama", 0), ("mixtral", 0), ("mixtral", 2)])
def test_abstract_programs_are_those_of_an_engine(model, slots):
    """Without arrays: the same names, and arguments of the same shapes."""
    config = engines.ENGINES["roomy"]
    engine = engines.build(config, model, placement=WeightPlacement(1, expert_slots=slots))
    served, mesh = engines.functional(engines.model_of(model, "float32")), MeshSpec.parse("tensor=1")
    sizes = dataclasses.replace(config, layer_window=1)
    place = mesh.build(jax.devices()[:1])
    abstract = AbstractStreamedRunner(served, served.abstract(), sizes, place, expert_slots=slots)
    real, rows = {one.name: one for one in runner_of(engine)._programs()[0]}, max(config.prompt_buckets)
    found = abstract.programs_of(rows)
    parts = [str(n) for n in range(len(served.config.segments))]
    if slots:
        write = next(name for name in real if name.startswith("expert-"))
        assert next(iter(found)) == write
        parts = [kind for _ in parts for kind in ("route", "first", "more", "join", "predict")]
    assert [name.rpartition("-")[2] for name in found][bool(slots) :] == ["begin", *parts, "end"]
    for name, one in found.items():
        shapes = (jax.tree.map(lambda x: (x.shape, str(x.dtype)), p.arguments) for p in (one, real[name]))
        assert len({str(jax.tree.flatten(tree)) for tree in shapes}) == 1
    runner_of(engine).close()
    with pytest.raises(ValueError, match="of one device, with layer_window"):
        AbstractStreamedRunner(served, served.abstract(), config, mesh.build(jax.devices()[:1]))


def test_what_does_not_go_together_is_refused(tmp_path):
    config = EngineConfig(layer_window=2)
    for fields, said in (({"draft_features": True}, "draft_features"), ({"kv_disk": "x"}, "kv_disk")):
        with pytest.raises(ValueError, match=said):
            dataclasses.replace(config, **fields)
    with pytest.raises(ValueError, match="layer_window"):
        EngineConfig(layer_window=-1)
    with pytest.raises(ValueError, match="disk is None"):
        WeightPlacement(host_units=3)
    with pytest.raises(ValueError, match="window"):
        WeightPlacement(0)
    small = engines.ENGINES["roomy"]
    for fields, said in (({"kv_dtype": "bfp4"}, "bfp4"), ({"speculate": "self:1"}, "self:1")):
        with pytest.raises(ValueError, match=said):
            engines.build(dataclasses.replace(small, **fields), placement=placed("host", tmp_path))
    with pytest.raises(ValueError, match="layer_window"):
        engines.Engine.of(
            engines.functional(engines.model_of("llama", "float32")), engines.params_of("llama", "float32"), config
        )
    engine = engines.build(small, placement=placed("host", tmp_path))
    with pytest.raises(ValueError, match="cannot be replaced"):
        engine.swap(engines.params_of("llama", "float32"))


def test_tiers_are_spread_over_the_model_within_their_bytes():
    assert spread("abcdefg", 3) == (list("ceg"), list("abdf"))
    assert spread("ab", 5) == (["a", "b"], [])
    assert spread("ab", 0) == ([], ["a", "b"])
    # A first layer that is larger than the others, as of a mixture after a dense one.
    sizes = [5, 2, 2, 2, 2]
    for device, want in ((0, 0), (2, 1), (4, 2), (5, 2), (6, 3), (8, 4), (13, 5)):
        placement = OffloadBudget(device=device, host=4, disk=Path("d")).placement(sizes)
        assert placement.device_units == want
        on_device, others = spread(sizes, want)
        assert sum(on_device) <= device
        assert placement.host_units is not None
        assert sum(spread(others, placement.host_units)[0]) <= 4


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("memory", [None, {"bytes_limit": 1 << 26, "bytes_in_use": 0}])
def test_pages_keep_to_the_limit_of_the_kv_cache(memory, monkeypatch):
    """As many pages as the limit has room for, on a CPU and on a device that has more; pages that are given count."""
    monkeypatch.setattr(ModelRunner, "_page_device", SimpleNamespace(memory_stats=lambda: memory))
    config = dataclasses.replace(engines.ENGINES["roomy"], pages=None, max_len=64)

    def pages(limit: int | None, given: int | None = None) -> tuple[int, int]:
        placement = OffloadBudget(1, kv_limit=limit).placement([1] * 4)
        engine = engines.build(dataclasses.replace(config, pages=given), "llama", placement=placement)
        spec = engine.runner.spec
        runner_of(engine).close()
        return spec.pages[0], spec.groups[0].page_bytes(spec.page_size)

    most, size = pages(None)
    assert most > 12
    assert pages(12 * size) == pages(13 * size - 1) == (12, size)
    assert pages(10**12)[0] == most
    assert pages(12 * size, given=20)[0] == 20
    with pytest.raises(ValueError, match=r"64 tokens needs .* larger kv_limit"):
        pages(8 * size)  # a sequence has 8 pages, and one of the pool is never used


def test_counts_say_where_layers_came_from(tmp_path):
    engine = engines.build(engines.ENGINES["roomy"], "llama", placement=placed("mixed", tmp_path, 1))
    engines.serve(engine, [{"prompt": [1, 2], "params": GREEDY}])
    window, steps = runner_of(engine).window, engine.metrics.steps
    layers = len(window.units)
    assert window.counts.units == steps * layers
    assert window.counts.reads["host"] - steps in (0, 1)
    assert window.counts.reads["disk"] - steps * (layers - 2) in (-1, 0, 1)
    said = runner_of(engine).counters()
    assert said["layer_reads_disk"] == window.counts.reads["disk"]
    assert said["layer_stalls"] == window.counts.stalls
    assert window.counts.read_bytes["host"] == window.resident_bytes * window.counts.reads["host"]
