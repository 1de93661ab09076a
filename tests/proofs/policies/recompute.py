"""Gradient accumulation and remat change neither loss nor gradients."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.data import DataConfig
from jaxllm.models import functional
from jaxllm.models.remat import VALUES, moved_values, save_policy
from jaxllm.plan.graphs.block_graph import block_graphs
from jaxllm.plan.graphs.block_placement import place_block
from jaxllm.train import RunConfig, value_and_grad
from sharding import MeshSpec
from tests import quick, tiny
from tests.proofs.harness import proof

POLICIES = (
    *("elementwise", "attention", "full", "sqrt", "offload", "offload:0.5"),
    *("none=1,full=3", "full=2,attention=1,elementwise=1", "offload=1,offload:0.25=2,none=1"),
)
CONFIG = tiny.decoder(layers=4, qk_norm="head", norms="sandwich", remat="none")


@functools.cache
def result(remat: str, accumulate: int, seed: int, model: str = "norms") -> tuple[float, Any]:
    """Loss and gradients of a packed batch."""
    config = dataclasses.replace(MODELS[model], remat=remat)
    params = jax.tree.map(jnp.asarray, quick.params(config, seed))
    batch = jax.tree.map(jnp.asarray, tiny.batch(seed, 4, 12, config.vocab_size, packed=True, padding=True))
    sums, grads = quick.jit(value_and_grad(functional(config), accumulate=accumulate))(params, batch)
    return float(sums.loss / sums.count), grads


LATENT = dataclasses.replace(CONFIG, pattern=tiny.decoder(latent=8, norms="post").pattern)
MODELS = {"norms": CONFIG, "latent": LATENT}


def placements() -> list[tuple[str, str]]:
    """Policies of two models: each value of its own on the device and on the host, and 12 random sets of each model's
    values, some of them on the host.
    """
    found: list[tuple[str, str]] = []
    rng = np.random.default_rng(0)
    for model, config in MODELS.items():
        own = [one.name for one in config.pattern[0].matmul_values(config.embed_dim) if one.name in VALUES]
        found += [(model, save_policy([name])) for name in own] + [(model, save_policy([], [name])) for name in own]
        for _ in range(12):
            place = rng.choice(["device", "host", "again"], len(own) + 1)
            here = [name for name, one in zip(own, place, strict=False) if one == "device"]
            there = [name for name, one in zip([*own, "input"], place, strict=True) if one == "host"]
            found.append((model, save_policy(here, there)))
    return list(dict.fromkeys(found))


@proof(
    "policies",
    cases=[
        f"save:{'+'.join(kept)}"
        for n in (1, 2, 3, 4)
        for kept in itertools.combinations(("qkv", "attention", "residual", "inner"), n)
    ],
    sample=1,
    bound={"loss": 1e-10, "grads": 1e-10},
    float64=True,
)
def kept_values(remat: str) -> dict[str, float]:
    """Every set of the four groups of kept values, in two micro-batches, against no remat in one."""
    (loss, grads), (want, wanted) = result(remat, 2, 1), result("none", 1, 1)
    return {"loss": abs(loss / want - 1), "grads": tiny.leaf_error(grads, wanted)}


@proof("policies", cases=placements(), sample=1, bound={"loss": 1e-10, "grads": 1e-10}, float64=True)
def single_values(case: tuple[str, str]) -> dict[str, float]:
    """Sets of single values that are kept or moved, in two micro-batches, against no remat in one."""
    model, remat = case
    (loss, grads), (want, wanted) = result(remat, 2, 1, model), result("none", 1, 1, model)
    return {"loss": abs(loss / want - 1), "grads": tiny.leaf_error(grads, wanted)}


@proof(
    "policies",
    cases=[(model, share) for model in MODELS for share in (0.0, 0.2, 0.4, 0.6, 0.8)],
    sample=1,
    bound={"loss": 1e-10, "grads": 1e-10, "over the room": 0.0},
    float64=True,
)
def placements_run(case: tuple[str, float]) -> dict[str, float]:
    """The placement of a block that moves the fewest bytes (COSMA), for a share of its values' bytes on the device:
    loss and gradients of its policy against no remat.
    """
    model, share = case
    run = RunConfig(model=MODELS[model], data=DataConfig(batch_size=4, seq_len=12), mesh="data=1", steps=2)
    (block,) = block_graphs(run, MeshSpec.parse("data=1"))
    policy = block.best(sum(map(block.bytes_of, block.values())))
    kept = block.kept_by(policy)
    assert kept is not None
    room = int(share * (kept.bytes + block.stream))
    placed = place_block(block, policy, room)
    assert moved_values(placed.policy), placed
    (loss, grads), (want, wanted) = result(placed.policy, 1, 2, model), result("none", 1, 2, model)
    errors = {"loss": abs(loss / want - 1), "grads": tiny.leaf_error(grads, wanted)}
    return errors | {"over the room": max(0.0, placed.device - room)}


@proof(
    "policies",
    cases=[(remat, accumulate) for remat in POLICIES for accumulate in (1, 2, 4)],
    sample=2,
    bound={"loss": 1e-10, "grads": 1e-10},
    float64=True,
)
def recompute(case: tuple[str, int]) -> dict[str, float]:
    """Every policy, with one, two and four micro-batches, against no remat with one."""
    (loss, grads), (want, wanted) = result(*case, 0), result("none", 1, 0)
    return {"loss": abs(loss / want - 1), "grads": tiny.leaf_error(grads, wanted)}
