"""A run's sharding table, for devices that need not be here."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models import functional
from jaxllm.optim import optimizer
from jaxllm.parallel.table import Table, table
from jaxllm.parallel.traffic import expected
from jaxllm.train.config import RunConfig
from jaxllm.train.loop import fitting_mesh
from jaxllm.train.state import abstract_state


def sharding_table(config: RunConfig, num_devices: int) -> Table:
    """How a run's parameters and optimizer state lie on ``num_devices`` devices; nothing is allocated or compiled.

    Raises:
        ShardingError: the run does not fit its mesh; lists the nearest that it does.
    """
    model = functional(config.model, config.parallel.rules())
    mesh = fitting_mesh(config, model, num_devices).abstract()
    transform = optimizer(config.optim, config.steps, model.logical_axes())
    state = abstract_state(model, transform, mesh)
    found = table(state.params, state.opt_state, model.logical_axes(), mesh.shape)
    rows, length = config.data.batch_size, config.data.seq_len
    try:
        sent = expected(model, mesh, config.parallel, rows=rows, seq_len=length, accumulate=config.accumulate)
    except NotImplementedError as unknown:
        return replace(found, remark=str(unknown))
    return replace(found, collectives=sent)
