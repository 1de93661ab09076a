"""Serving on meshes: log-probabilities are those of the training forward on one device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import sharding
from jaxllm.models import functional
from jaxllm.optim import OptimConfig, ScheduleConfig, optimizer, schedule
from jaxllm.train import abstract_state, init_state, train_step, value_and_grad
from jaxllm.train.step.step_links import routing_report
from tests import quick, tiny
from tests.infer import engines, meshes
from tests.proofs.engine.programs import Compilations
from tests.proofs.harness import proof

DENSE = [
    ("tensor=8", "wide", "roomy"),
    ("tensor=8", "few kv heads", "tight, swap"),
    ("tensor=4", "llama", "tight, recompute"),
    ("tensor=4", "qwen3", "roomy"),
    ("tensor=2", "gemma2", "tight, swap"),
    ("tensor=2", "gpt2", "contiguous"),
    ("data=8", "smollm2", "tight, recompute"),
    ("data=2,tensor=4", "llama", "tight, swap"),
    ("data=2,tensor=4", "wide", "layers apart"),
    ("data=4,tensor=2", "qwen2", "tight, recompute"),
    ("data=2,tensor=2", "mistral", "contiguous"),
    ("fsdp=2,tensor=2", "olmo2", "roomy"),
    ("data=2,fsdp=2,tensor=2", "phi3", "tight, swap"),
]
MIXED = [
    ("expert=4", "mixtral", "tight, recompute"),
    ("expert=2,tensor=2", "mixtral", "tight, swap"),
    ("data=2,expert=2,tensor=2", "mixtral", "roomy"),
    ("expert=4", "gpt_oss", "one after the other"),
    ("data=2,expert=2", "deepseek_v3", "tight, swap"),
    ("expert=2,tensor=4", "deepseek_v3", "roomy"),
    ("tensor=2", "deepseek_v3", "contiguous"),
    ("fsdp=2,expert=2", "mixtral", "layers apart"),
]
"""(mesh, model, way to serve)."""


@proof("engine_two", cases=DENSE + MIXED, sample=1, float64=True, bound=1e-10)
def sharded_is_unsharded(case: tuple[str, str, str]) -> float:
    """Random traffic with continuous batching, too few pages where the way says so; nothing is compiled meanwhile."""
    mesh, model, way = case
    engine, heard = (
        meshes.over(mesh, model, engines.ENGINES[way], "float64", apart=way == "layers apart"),
        Compilations(),
    )
    worst = 0.0
    for seed in range(2):
        rng = np.random.default_rng([seed, *mesh.encode(), *model.encode()])
        asked = engines.traffic(rng, engine.config, 8 + 3 * engine.runner.spec.replicas)
        with heard:
            made = engines.serve(engine, asked)
        assert heard.names == []
        worst = max(worst, engines.error(model, "float64", made))
    assert engine.runner.program_cache.counts.late == 0  # type: ignore[attr-defined]
    return worst


SWAPS = [
    ("fsdp=4,tensor=2", "data=2,tensor=4", "llama"),
    ("fsdp=8", "tensor=2", "llama"),
    ("data=2,fsdp=4", "expert=2,tensor=2", "mixtral"),
    ("expert=4,tensor=2", "data=2,expert=4", "mixtral"),
]
"""(mesh that trains, mesh that serves, model)."""


@proof("engine_two", cases=SWAPS, sample=1, float64=True, bound=1e-10)
def training_states_are_swapped_in(case: tuple[str, str, str]) -> float:
    """After every step of training its state goes into a serving engine, then gives its buffers to the next step.

    Every log-probability is that of the weights that made its token; nothing is compiled from the second step on.
    """
    over, served, model = case
    config, forward = engines.model_of(model, "float64"), engines._forward(model, "float64")
    whole = engines.params_of(model, "float64")  # outside the mesh: what jnp.asarray makes inside lies on it (jax 0.12)
    made, mesh = functional(config), sharding.MeshSpec.parse(over).build()
    rules = OptimConfig(ScheduleConfig("constant", peak=0.02, warmup=0.5))
    transform = optimizer(rules, 8, made.logical_axes())
    with jax.set_mesh(mesh):
        abstract = abstract_state(made, transform, mesh)
        start = jax.device_put(whole, sharding.shardings_of(abstract.params))
        start = jax.tree.map(jnp.copy, start)  # for the first step to take
        state = init_state(made, transform, mesh, 0, abstract, start)
        step = train_step(
            value_and_grad(made), transform, schedule(rules.schedule, 8), reports=[routing_report(config)]
        )
        run = quick.jit(step, donate_argnums=0, out_shardings=(sharding.shardings_of(abstract), None))
        place = jax.NamedSharding(mesh, made.rules.spec(("batch", "seq"), mesh))
        batches = [jax.device_put(tiny.batch(i, 8, 8, engines.VOCAB, packed=False), place) for i in range(5)]
        state, _ = run(state, batches[0])
    engine, heard = meshes.over(served, model, engines.ENGINES["tight, recompute"], "float64"), Compilations()
    rng = np.random.default_rng([*over.encode(), *served.encode()])
    requests, weights = [], [whole]
    for asked in engines.traffic(rng, engine.config, 10 * engine.runner.spec.replicas):
        params = dataclasses.replace(asked["params"], logprobs=0, prompt_logprobs=None)
        requests.append(engine.submit(asked["prompt"], params, salt=asked["salt"]))
    for batch in batches[1:]:
        weights.append(jax.tree.map(np.array, state.params))
        with heard:
            for _ in range(6):
                if engine.busy:
                    engine.step()
            engine.swap(state.params)
            with jax.set_mesh(mesh):
                state, _ = run(state, batch)
        assert heard.names == []
    while engine.busy:
        engine.step()
    worst, seen = 0.0, set()
    for request in requests:
        for s in request.sequences:
            padded = np.zeros((1, engines.LONGEST), np.int32)
            padded[0, : len(s.tokens)] = s.tokens
            for version in set(s.versions):
                want = np.asarray(forward(weights[version], padded))
                places = [i for i, v in enumerate(s.versions, len(request.prompt)) if v == version]
                gaps = [abs(want[i - 1, s.tokens[i]] - s.logprobs[i - len(request.prompt)]) for i in places]
                worst = max(worst, *gaps)
                seen.add(version)
    assert len(seen) > 2
    assert engine.runner.program_cache.counts.late == 0  # type: ignore[attr-defined]
    return worst
