"""ZO2 is MeZO with an update that is applied in the next step; its bits do not depend on where the parameters are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models import functional
from jaxllm.optim import optimizer
from jaxllm.train import RunConfig, TrainState, abstract_state, init_state
from jaxllm.train.host_offload import HostConfig, host_bytes
from jaxllm.train.run import build_value_and_grad
from jaxllm.train.step.step_builder import build_step, settle_function, step_links
from jaxllm.train.step.step_chain import link_states
from jaxllm.train.step.zo2 import PENDING
from sharding import MeshSpec, shardings_of
from tests import quick, tiny
from tests.proofs.harness import proof
from tests.train.test_zo2 import AWAY, run_of

STEPS = 3


def trained(run: RunConfig, memory: HostConfig) -> tuple[list[dict[str, Any]], list[TrainState]]:
    """Metrics and states of a few steps of a run, its arrays in these memories; pending updates are applied."""
    model, mesh = functional(run.model), MeshSpec.parse("data=1").build(jax.devices()[:1])
    rule = optimizer(run.optim, run.steps, model.logical_axes())
    links = link_states(step_links(run))
    abstract = abstract_state(model, rule, mesh, memory, links)
    shardings = shardings_of(abstract)
    step = build_step(run, model, build_value_and_grad(run, model, mesh), rule)
    settle = settle_function(run, model)
    rows, states = [], []
    with jax.set_mesh(mesh):
        jitted = quick.jit(step, out_shardings=(shardings, None))
        settled = settle and quick.jit(settle, out_shardings=shardings)
        params = jax.device_put(quick.params(run.model), shardings.params)
        state = init_state(model, rule, mesh, 0, abstract, params, links)
        assert (host_bytes(state.params) > 0) == memory.params
        for number in range(STEPS):
            batch = jax.tree.map(jnp.asarray, tiny.batch(number, 2, 8, run.model.vocab_size, packed=True))
            state, metrics = jitted(state, batch)
            rows.append(jax.device_get(metrics))
            assert settled is None or state.extras[PENDING].due
            states.append(jax.device_get(state if settled is None else settled(state)))
    return rows, states


@proof("optimizers", cases=["losses and parameters"], sample=1, float64=True)
def zo2_is_mezo_one_update_late(case: str) -> None:
    """Losses of every step, and parameters and optimizer state once the pending update is applied."""
    (rows, states), (others, late) = (trained(run_of(host), HostConfig()) for host in (HostConfig(), AWAY))
    for row, other in zip(rows, others, strict=True):
        for name in ("loss", "nll", "learning_rate", "grad_norm"):
            np.testing.assert_allclose(row[name], other[name], rtol=1e-10, err_msg=name)
    for state, now in zip(states, late, strict=True):
        assert not now.extras[PENDING].due
        assert tiny.leaf_error(now.params, state.params) < 1e-10
        jax.tree.map(np.testing.assert_array_equal, now.opt_state, state.opt_state)
    # The norms are those of the update that the step applied: none in the first, else that of the step before.
    assert others[0]["update_norm"] == 0
    for name in ("update_norm", "param_norm"):
        np.testing.assert_allclose(others[2][name], rows[1][name], rtol=1e-10)


@proof("optimizers", cases=["device and host"], sample=1)
def zo2_bits_on_host_and_device(case: str) -> None:
    """Metrics, parameters and optimizer state of three steps."""
    (rows, states), (others, away) = (trained(run_of(AWAY, "float32"), memory) for memory in (HostConfig(), AWAY))
    jax.tree.map(np.testing.assert_array_equal, rows, others)
    for state, other in zip(states, away, strict=True):
        jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (other.params, other.opt_state))
