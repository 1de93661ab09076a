"""Projected gradients (CompAct): on meshes, in compiled programs, and in training on real text."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.data import DataConfig
from jaxllm.models import functional
from jaxllm.optim.compact import input_dims
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import step_on
from sharding.topology import Topology
from tests import tiny
from tests.optim.kinds import named
from tests.proofs.harness import proof
from tests.proofs.optimizers import learning, parity

MESHES = ("fsdp=8", "fsdp=2,tensor=4", "data=2,fsdp=2,tensor=2", "fsdp=2,context=2,tensor=2", *parity.MESHES[2:])


@proof("optimizers", cases=MESHES, sample=1, float64=True, bound={"loss": 1e-10, "parameters": 1e-10})
def projected_on_meshes(mesh: str) -> dict[str, float]:
    """Losses of four steps with two projections, and each parameter after them, as on one device."""
    if "stage" in mesh:
        with pytest.raises(ConfigError, match=r'optim\.kind = "compact" .*leave stage out'):
            parity.trained("compact", mesh)
        return {"loss": 0.0, "parameters": 0.0}
    losses, params = parity.trained("compact", mesh)
    want, wanted = parity.alone("compact")
    assert np.ptp(want) > 1e-3
    return {"loss": float(np.abs(losses / want - 1).max()), "parameters": tiny.leaf_error(params, wanted)}


@proof("optimizers", cases=[4, 8, 16], sample=1, bound=0.0)
def projected_state(rank: int) -> float:
    """Argument bytes of the compiled step: less than AdamW's by (1 - r / c) of both moments of each matrix, exactly."""
    config = tiny.decoder(dtype="float32", embed_dim=64, mlp=96, layers=3, remat="full")
    model = functional(config)

    def arguments(**optim: int | str) -> int:
        run = RunConfig(
            model=config, optim=named(**optim), steps=10, data=DataConfig(batch_size=2, seq_len=8), mesh="dp"
        )
        step, (state, batch), mesh = step_on(Topology.parse("cpu:1"), run)
        with jax.set_mesh(mesh):
            return step.lower(state, batch).compile().memory_analysis().argument_size_in_bytes

    axes = jax.tree.leaves(model.logical_axes(), is_leaf=lambda x: isinstance(x, tuple))
    saved = 0
    for leaf, one in zip(jax.tree.leaves(model.abstract()), axes, strict=True):
        if dims := input_dims(one):
            inner = int(np.prod([leaf.shape[i] for i in dims]))
            saved += 8 * leaf.size * (inner - rank) // inner
    counter = 4  # of a second step counter
    difference = arguments(name="adamw") - arguments(name="compact", rank=rank)
    return abs(difference + counter - saved)


@proof("optimizers", cases=["compact"], sample=1, bound={"loss over sgd's": 0.99})
def projected_beats_descent(name: str) -> dict[str, float]:
    """The best of seven learning rates, over the best of the same seven of descent with momentum."""
    return {"loss over sgd's": learning.best(name) / learning.best("sgd")}
