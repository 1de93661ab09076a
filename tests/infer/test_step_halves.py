"""Steps in two halves: which rows and requests each has, what is refused, and that they are what the engine runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import cli
from jaxllm.config import ConfigError
from jaxllm.infer import EngineConfig
from jaxllm.infer.runner.paged_cache import PagedCache
from jaxllm.infer.runner.serving_mesh import check_overlap
from jaxllm.infer.runner.step.step_halves import halved_requests, halved_rows
from sharding import MeshSpec, ShardingError
from tests.infer import engines
from tests.infer.meshes import over


@pytest.mark.parametrize("lengths", [(5, 0, 3, 1), (1, 0, 0, 0), (0, 0, 0, 0), (8, 8, 0, 1), (1, 9, 2, 2)])
def test_each_row_is_in_one_half_and_sees_the_keys_before_it(lengths):
    starts, before = np.cumsum([0, *lengths]).astype(np.int32), np.array([7, 4, 0, 2], np.int32)
    lens = jnp.asarray(before + np.array(lengths, np.int32))
    table = jnp.zeros((4, 3), jnp.int32)
    middle, halves = halved_rows((table,), jnp.asarray(starts), lens)
    assert int(middle) == sum(lengths) // 2
    found: list[tuple[int, int]] = []
    for first, (tables, own_starts, own_lens) in zip((0, int(middle)), halves, strict=True):
        assert tables[0] is table
        each = np.asarray(own_starts)
        for request in range(4):
            rows = range(int(each[request]), int(each[request + 1]))
            ends = int(own_lens[request])
            found += [(request, ends - len(rows) + n) for n in range(len(rows))]
            assert all(starts[request] <= first + row < starts[request + 1] for row in rows)
    assert sorted(found) == [(r, int(before[r]) + n) for r, count in enumerate(lengths) for n in range(count)]


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_each_request_of_a_decode_step_is_in_one_half(rng, rows):
    lens = jnp.asarray(rng.integers(1, 9, (1, rows)), jnp.int32)
    starts = jnp.minimum(jnp.arange(rows + 1, dtype=jnp.int32), rows - 1)[None]  # the last row is padding
    tables = tuple(jnp.asarray(rng.integers(0, 9, (1, rows, 3)), jnp.int32) for _ in range(2))
    cache = PagedCache((), tables, starts, lens, (), decode_only=True)
    one, two = halved_requests(cache)
    assert [x.shape[1] for x in (one[2], two[2])] == [rows // 2, rows - rows // 2]
    assert (np.concatenate([one[2], two[2]], axis=1) == lens).all()
    for both in zip(one[0], two[0], tables, strict=True):
        assert (np.concatenate(both[:2], axis=1) == both[2]).all()
    assert (one[1] == np.arange(rows // 2 + 1)).all()
    assert (two[1] == np.minimum(np.arange(rows - rows // 2 + 1), rows - 1 - rows // 2)).all()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"adapter_slots": 2}, "adapter_slots = 2"),
        ({"retention": "corm", "prefix_cache": False}, "retention = 'corm'"),
        ({"kv_dtype": "kivi4"}, "kv_dtype = 'kivi4', which encodes whole pages"),
        ({"draft_trees": True, "verify_tokens": 4}, "draft_trees"),
        ({"two_phase": True}, "two_phase"),
        ({"layer_window": 1}, "layer_window = 1"),
        ({"stages": 2}, "stages = 2"),
        ({"pools": "prefill=tensor:2 x1, decode=tensor:2 x1"}, "pools = "),
    ],
)
def test_what_halves_do_not_go_with_is_refused(fields: dict[str, Any], said):
    with pytest.raises(ConfigError, match=f"overlap = 'nano' does not go with .*{said}"):
        EngineConfig(overlap="nano", **fields)
    EngineConfig(overlap="iso", two_phase=True)  # which is of decode steps alone


def test_a_mesh_without_all_reduces_to_hide_is_refused(capsys):
    with pytest.raises(ConfigError, match="legal: 'none', 'iso', 'nano'"):
        EngineConfig(overlap="halves")  # type: ignore[arg-type]
    for mesh, said in ((None, "one device"), ("data=2", "'data': 2"), ("context=2,tensor=2", "context=2")):
        built = None if mesh is None else MeshSpec.parse(mesh).build(jax.devices()[: 4 if "," in mesh else 2])
        with pytest.raises(ShardingError, match=said):
            check_overlap(built, "plain")
    with pytest.raises(ConfigError, match="residual = 'ladder'"):
        check_overlap(MeshSpec.parse("tensor=2").build(jax.devices()[:2]), "ladder")
    assert cli.main(["generate", "smollm2", "--prompt", "x", "--overlap", "iso"])
    assert "give tensor=2 or more, or leave overlap out" in capsys.readouterr().err


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(("overlap", "in_halves"), [("iso", {"prompt"}), ("nano", {"prompt", "decode"})])
def test_an_engine_runs_its_steps_in_halves(rng, overlap, in_halves):
    config = dataclasses.replace(engines.ENGINES["tight, recompute"], overlap=overlap)
    engine = over("tensor=2", "llama", config)
    seen: set[str] = set()
    run = engine.runner.run

    def watching(shape: Any, *given: Any) -> Any:
        if shape.halves:
            seen.add("decode" if shape.decode else "prompt")
        return run(shape, *given)

    engine.runner.run = watching  # type: ignore[method-assign]
    assert engines.error("llama", "float32", engines.serve(engine, engines.traffic(rng, config, 5))) < 1e-3
    assert seen == in_halves
