"""Slow replicas: gradients and parameters of a model with the projections in it, without stages or replicas."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models import Functional, functional
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.parallel.pipeline.stage_messages import SlowLinks, lost
from jaxllm.train import RunConfig
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.step.loss import value_and_grad
from jaxllm.train.step.step_builder import build_optimizer
from jaxllm.train.step.training_step import jit_step
from tests import environment, quick, tiny
from tests.train.outer_runs import batch_at, parts_of, run_of, trained

MODEL = tiny.decoder(kv_heads=4, layers=4)
SGD = OptimConfig(ScheduleConfig("constant", peak=0.3), kind="sgd", clip_norm=None)
AVERAGE = OuterConfig("diloco", every=1, rate=1.0, momentum=0.0)
DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16"}
PERMUTE = re.compile(r"= \(?(\w+)\[([\d,]*)\].* collective-permute(?:-start)?\(.*source_target_pairs=\{(.*?)\}\}")


@dataclasses.dataclass(frozen=True)
class Projected(Functional):
    """A decoder in which some layers' inputs are projected, and what that takes is the embedding's."""

    at: tuple[int, ...] = ()
    links: Any = None

    def forward(self, params: Any, tokens: Any, positions: Any, ctx: Any) -> Any:
        """See ``Functional.forward``."""
        embedding = x = self.embed(params, tokens, positions)
        basis = self.links.basis(x.shape[-1], x.dtype)
        for layer in range(self.config.layers):
            if layer in self.at:
                x = (x @ basis) @ basis.T + lost(embedding, basis)
            own = jax.tree.map(lambda w, layer=layer: w[layer], params["segments"]["0"])
            x, ctx = self.group(0, own, x, positions, jnp.int32(layer), ctx)
        return x, ctx


def definition_error(
    rank: int, schedule: str, cut: tuple[int, ...], slow: tuple[int, ...] = (1,), mesh: str = "replica=2,stage=2"
) -> float:
    """Error of the parameters after a step of two replicas of two stages, against the mean of two separate steps.

    Args:
        rank: of the projection in slow replicas.
        schedule: of the pipeline.
        cut: layers whose input comes from another stage.
        slow: numbers of the slow replicas.
        mesh: of the run.
    """
    outer = dataclasses.replace(AVERAGE, slow=slow, stage_rank=rank)
    run = run_of(mesh, outer, SGD, 1, model=MODEL, accumulate=2)
    parallel = dataclasses.replace(run.parallel, schedule=schedule)
    found = jax.device_get(trained(dataclasses.replace(run, parallel=parallel)).state.params)
    plain, start, batch = functional(MODEL), quick.params(MODEL), batch_at(0)
    half = batch.tokens.shape[0] // 2
    made = []
    for replica in range(2):
        model: Any = plain
        if replica in slow:
            fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
            model = Projected(**fields, at=cut, links=SlowLinks(2, slow, rank))
        rows = jax.tree.map(lambda x, r=replica: x[r * half : (r + 1) * half], batch)
        made.append(quick.jit(value_and_grad(model))(start, rows)[1])
    optimizer = build_optimizer(run, plain)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *made)
    change, _ = optimizer.update(mean, optimizer.init(start), start)
    want = jax.tree.map(lambda w, d: np.asarray(w) + np.asarray(d), start, change)
    assert tiny.leaf_error(want, start) > 1e-3, "the parameters have moved"
    return tiny.leaf_error(found, want)


def compiled_text(run: RunConfig) -> tuple[str, Any]:
    """(text of a run's compiled step, numbers of its devices by replica and stage)."""
    model, _, mesh, abstract, step = parts_of(run)
    there = jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), batch_at(0))
    with jax.set_mesh(mesh):
        text = jit_step(step, abstract).lower(abstract, batch).compile(environment.AS_EVER).as_text()
    places = [mesh.axis_names.index(name) for name in ("replica", "stage")]
    return text, np.moveaxis(np.vectorize(lambda device: device.id)(mesh.devices), places, [0, 1])


def message_bytes(text: str, devices: Any) -> dict[int, set[int]]:
    """Bytes of messages between stages of a compiled program, by the replica that sends them.

    Args:
        text: of the program.
        devices: numbers of its devices, [replicas, stages, ...].
    """
    places = {int(device): place for place, device in np.ndenumerate(devices)}
    found: dict[int, set[int]] = {replica: set() for replica in range(len(devices))}
    for dtype, shape, pairs in PERMUTE.findall(text):
        size = int(np.prod([int(one) for one in shape.split(",")])) * jnp.dtype(DTYPES[dtype]).itemsize
        for pair in pairs.strip("{}").split("},{"):
            source, target = (places[int(one)] for one in pair.split(","))
            if source[1] != target[1]:
                assert source[0] == target[0], "stages of one replica alone send to each other"
                found[source[0]].add(size)
    return found
