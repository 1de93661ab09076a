"""Program cache: compiled ahead, stored, signed, found again, and never called with anything else."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.infer import RecompileError, SamplingParams
from jaxllm.infer.runner.program_cache import EngineProgram, ProgramCache, source_digest
from jaxllm.infer.runner.step.packed_buffer import PackedBuffer
from jaxllm.infer.streaming.streamed_weights import WeightPlacement
from jaxllm.models import functional
from jaxllm.quant.packing import pack_params
from tests import environment, quick
from tests.infer import engines
from tests.power_cut import PowerCut, write_tree


def program(size: int = 4, name: str = "twice") -> EngineProgram:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    array = jax.ShapeDtypeStruct((size,), jnp.float32, sharding=here)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=here)
    arguments = {"weights": {"a": array, "unused": array}, "state": (array,), "count": count}

    def twice(weights, state, count):
        return (state[0] * 2 + weights["a"],), count + 1

    return EngineProgram(name, twice, arguments, donated=("state",))


def make(folder: Path | None, key: object = 1, strict: bool = True, one: EngineProgram | None = None) -> tuple:
    cache = ProgramCache(folder, key, jax.devices()[:1], strict)
    one = one or program()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        return cache.compile_all([one])[one.name], cache


def arguments(size: int = 4) -> tuple:
    array = np.ones(size, np.float32)
    return {"a": array, "unused": array}, (jnp.asarray(array),), np.int32(1)


@pytest.fixture(autouse=True)
def own_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))


def test_a_kept_program_is_loaded_and_runs_alike(tmp_path):
    one, cache = make(tmp_path)
    assert (cache.counts.compiled, cache.counts.loaded) == (1, 0)
    again, cache = make(tmp_path)
    assert (cache.counts.compiled, cache.counts.loaded) == (0, 1)
    for run in (one, again):
        given = arguments()
        (out,), count = run(*given)
        np.testing.assert_array_equal(out, 3)
        assert int(count) == 2
        assert given[1][0].is_deleted(), "what is donated is gone"


def test_a_power_cut_leaves_a_program_or_none(tmp_path):
    """After a cut at any moment of a save, the program is loaded or compiled anew, and runs alike."""
    home = tmp_path / "disk"
    home.mkdir()
    make(None)  # the key of signatures is there
    cut, seen = PowerCut(home, environment.seed()), set()
    with cut.recording():
        make(home)
    for number, (tree, _) in enumerate(cut.states):
        run, cache = make(write_tree(tree, tmp_path / f"cut{number}"))
        (out,), _ = run(*arguments())
        np.testing.assert_array_equal(out, 3)
        seen.add((cache.counts.compiled, cache.counts.loaded))
    assert seen == {(1, 0), (0, 1)}


def test_another_key_or_shape_is_another_program(tmp_path):
    make(tmp_path)
    for _, cache in (make(tmp_path, key=2), make(tmp_path, one=program(5))):
        assert cache.counts.compiled == 1


def test_what_was_not_signed_here_is_not_opened(tmp_path, monkeypatch):
    """A changed byte, another program's file under this name, or another key: compiled anew."""
    _, cache = make(tmp_path)
    (path,) = cache.folder.glob("twice-*.xla")
    whole = path.read_bytes()
    for wrong in (whole[:-1] + bytes([whole[-1] ^ 1]), bytes([whole[0] ^ 1]) + whole[1:], whole[:50], b""):
        path.write_bytes(wrong)
        _, cache = make(tmp_path)
        assert (cache.counts.compiled, cache.counts.loaded) == (1, 0)
        assert path.read_bytes() != wrong
    make(tmp_path, one=program(name="other"))
    (other,) = cache.folder.glob("other-*.xla")
    path.write_bytes(other.read_bytes())
    assert make(tmp_path)[1].counts.compiled == 1
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "another"))
    assert make(tmp_path)[1].counts.compiled == 1


def _shipped(folder: Path, trusted: bool) -> ProgramCache:
    cache = ProgramCache(None, 1, jax.devices()[:1], True, shipped=folder, trusted=trusted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        one = cache.compile_all([program()])["twice"]
    (out,), _ = one(*arguments())
    np.testing.assert_array_equal(out, 3)
    return cache


def test_shipped_programs_are_opened_if_they_are_ours_or_trusted(tmp_path, monkeypatch):
    """Our signature is enough; another's needs the user's word, a right checksum, and files that only the user writes.

    What was shipped is never written to.
    """
    _, made = make(tmp_path / "programs")
    (path,) = made.folder.glob("twice-*.xla")
    whole = path.read_bytes()
    assert _shipped(tmp_path / "programs", False).counts.loaded == 1
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "another user"))
    assert _shipped(tmp_path / "programs", False).counts.compiled == 1
    assert _shipped(tmp_path / "programs", True).counts.loaded == 1
    for place in (path, path.parent):
        mode = place.stat().st_mode
        place.chmod(mode | 0o020)
        assert _shipped(tmp_path / "programs", True).counts.compiled == 1
        place.chmod(mode)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert _shipped(tmp_path / "programs", True).counts.compiled == 1
    assert path.read_bytes() != whole


def test_a_program_is_kept_by_what_it_depends_on_besides_its_arguments(tmp_path):
    make(tmp_path)
    assert make(tmp_path, one=dataclasses.replace(program(), key=["other"]))[1].counts.compiled == 1
    assert make(tmp_path)[1].counts.loaded == 1


@pytest.mark.parametrize("streamed", [pytest.param(False, marks=pytest.mark.drawn(0.3)), True])
def test_formats_whose_arrays_are_alike_do_not_share_programs(streamed, tmp_path):
    """Three-bit integers and three-bit tables have arrays of the same shapes, and other programs."""
    model, plain = functional(engines.model_of("llama", "float32")), engines.params_of("llama", "float32")
    params = {name: pack_params(model, plain, name) for name in ("int3", "lut3")}
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(one)] for one in params.values()]
    assert shapes[0] == shapes[1]
    greedy = SamplingParams(max_tokens=6, temperature=0.0, seed=1, logprobs=1)

    def served(name: str, folder: Path | None) -> tuple[Any, int]:
        placement = WeightPlacement(1) if streamed else None
        engine = engines.build(
            engines.ENGINES["roomy"], "llama", params=params[name], manifest=folder, placement=placement
        )
        (made,) = engines.serve(engine, [{"prompt": [5, 6, 7], "params": greedy}])
        return (made.sequences[0].tokens, made.sequences[0].logprobs), engine.runner.program_cache.counts.compiled

    integers, compiled = served("int3", tmp_path)
    tables, own = served("lut3", tmp_path)
    if streamed:  # programs without a layer's weights are shared
        assert (tables, 0 < own < compiled) == (served("lut3", None)[0], True)
    else:
        assert own == compiled > 0
    assert served("int3", tmp_path) == (integers, 0)


def test_a_key_that_others_can_read_is_refused(tmp_path):
    make(tmp_path)
    key = tmp_path / "cache" / "engine.key"
    assert key.stat().st_mode & 0o777 == 0o600
    os.chmod(key, 0o644)
    with pytest.raises(PermissionError, match="can be read by others"):
        make(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w, s, c: (w, (jnp.ones(5),), c), r"state\[0\] is float32\[5\], compiled for float32\[4\]"),
        (lambda w, s, c: (w, s, jnp.float32(1)), r"count is float32\[\], compiled for int32\[\]"),
        (lambda w, s, c: ({"a": w["a"]}, s, c), "weights has another structure"),
        (lambda w, s, c: (w, (jax.device_put(s[0], jax.devices()[1]),), c), r"state\[0\] lies as .*compiled for"),
    ],
)
def test_other_arguments_are_named(change, words):
    one, cache = make(None)
    with pytest.raises(RecompileError, match=f"program twice would be compiled again: {words}"):
        one(*change(*arguments()))
    assert cache.counts.late == 1


def test_where_it_is_not_strict_it_is_counted():
    one, cache = make(None, strict=False)
    (out,), _ = one({"a": jnp.ones(5), "unused": jnp.ones(5)}, (jnp.ones(5),), jnp.int32(1))
    np.testing.assert_array_equal(out, 3)
    assert cache.counts.late == 1


def test_the_sources_are_part_of_the_key():
    assert len(source_digest()) == 64
    assert source_digest() == source_digest()


def test_arrays_travel_as_one(float64):
    """Float64 too, on the device and on the host."""
    layout = PackedBuffer((("a", (2, 3), "int32"), ("b", (), "int32"), ("c", (3,), "float64"), ("d", (2,), "uint32")))
    packed = np.zeros(layout.size, np.int32)
    views = layout.views(packed)
    values = {"a": np.arange(6).reshape(2, 3), "b": 7, "c": [0.1, -2.5, 1e300], "d": [2**32 - 1, 3]}
    for name, value in values.items():
        views[name][...] = value
    there = jax.jit(layout.unpack)(packed)
    back = layout.views(np.array(jax.jit(layout.pack)(there)))
    for name, value in values.items():
        np.testing.assert_array_equal(there[name], value)
        np.testing.assert_array_equal(back[name], value)
