"""Streamed weights over a mesh: tokens of resident weights, and a share of the window on each device."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import sharding
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from tests.infer import engines
from tests.proofs.engine.programs import Compilations
from tests.proofs.engine_two.disaggregated import DEGREES
from tests.proofs.harness import proof
from tests.proofs.offload.streamed_weights import WAYS, drawn

DIVIDED = {
    name: own for name, degrees in DEGREES.items() if (own := [n for n in degrees if n > 1 and not engines.VOCAB % n])
}
"""Models that are served over ``tensor``, and its sizes."""
OVER_HEADS = ("q", "o", "q_bias", "sinks", "q_up", "kv_up", "gate", "up", "down", "gate_bias", "up_bias")
"""Weights that are divided; keys and values too where their heads divide; all others are whole on every device."""


def part(name: str, x: Any, tensor: int) -> int:
    """Bytes of a weight on each device."""
    size = math.prod(x.shape) * x.dtype.itemsize
    divided = name in OVER_HEADS or (name in ("k", "v", "k_bias", "v_bias") and x.shape[-2] % tensor == 0)
    return size // tensor if divided else size


@proof("offload", count=30, sample=1, float64=True, bound={"logprobs": 1e-12, "bytes": 0}, counts=("parts",))
def streamed_shards_are_resident(seed: int) -> dict[str, float]:
    """Random traffic over random placements and degrees of ``tensor``. "bytes": those of layers that the fullest device
    has at a time, beyond the parts of the window's layers and of those that stay.
    """
    rng = np.random.default_rng(seed)
    model, way = str(rng.choice(list(DIVIDED))), str(rng.choice([way for way in WAYS if way != "invariant"]))
    tensor = int(rng.choice(DIVIDED[model]))
    config, units = engines.ENGINES[way], sum(n for _, n in engines.model_of(model, "float64").segments)
    with tempfile.TemporaryDirectory() as folder:
        placement = drawn(rng, units, Path(folder))
        mesh = sharding.MeshSpec.parse(f"tensor={tensor}").build(jax.devices()[:tensor])
        engine = engines.build(config, model, "float64", placement=placement, mesh=mesh)
        runner = engine.runner
        assert isinstance(runner, StreamedRunner)
        requests, counter, most = engines.traffic(rng, config, 5), Compilations(), [0.0]
        take = runner.window.take

        def watched(unit: object) -> object:
            """The bytes of layers on each device when a unit is taken: the window's, and those that stay."""
            got = take(unit)  # type: ignore[arg-type]
            ahead = [future.result() for _, future in runner.window._ahead if future.done()]
            trees = [*ahead, *runner.window._held.values()]
            for device in mesh.devices.flat:
                shards = (s for x in jax.tree.leaves(trees) for s in x.addressable_shards if s.device == device)
                most[0] = max(most[0], sum(s.data.nbytes for s in shards))
            return got

        runner.window.take = watched  # type: ignore[method-assign]
        with counter:
            made = engines.serve(engine, requests)
        assert not counter.names
        assert runner.window.counts.most <= placement.window
        parts = [
            sum(part(str(path[-1].key), x, tensor) for path, x in jax.tree_util.tree_leaves_with_path(tree))
            for tree in (runner._layers[unit.segment] for unit in runner.units)
        ]
        held = sum(sorted(parts)[-placement.window :]) if placement.window < units else sum(parts)
        stays = sum(part for part, unit in zip(parts, runner.units, strict=True) if unit in runner.window._held)
        runner.close()
        return {
            "logprobs": engines.error(model, "float64", made),
            "bytes": max(0.0, most[0] - held - stays),
            "parts": float(tensor),
        }


@proof("offload", count=30, sample=1, float64=True, bound={"logprobs": 1e-12}, counts=("through one device",))
def star_sums_are_all_reduces(seed: int) -> dict[str, float]:
    """Random traffic over ``tensor``, weights resident or streamed, whose sums of no more than some rows go through one
    device: log-probabilities of the training forward.
    """
    rng = np.random.default_rng(seed)
    model, way = str(rng.choice(list(DIVIDED))), str(rng.choice([way for way in WAYS if way != "invariant"]))
    architecture = engines.model_of(model, "float64")
    tensor = int(rng.choice(DIVIDED[model]))
    rows = int(rng.choice([engines.ENGINES[way].prompt_buckets[0], 1000]))
    config = dataclasses.replace(engines.ENGINES[way], star_bytes=rows * 8 * architecture.embed_dim)
    with tempfile.TemporaryDirectory() as folder:
        units = sum(n for _, n in architecture.segments)
        placement = drawn(rng, units, Path(folder)) if rng.random() < 0.5 else None
        mesh = sharding.MeshSpec.parse(f"tensor={tensor}").build(jax.devices()[:tensor])
        engine = engines.build(config, model, "float64", placement=placement, mesh=mesh)
        counter = Compilations()
        with counter:
            made = engines.serve(engine, engines.traffic(rng, config, 5))
        assert not counter.names
        permutes = sum("collective-permute" in one.compiled.as_text() for one in dict(engine.runner.programs).values())
        assert permutes
        engine.runner.close()
        return {"logprobs": engines.error(model, "float64", made), "through one device": float(permutes)}
