"""ZO2's pending update; its numbers: `make proof optimizers ONLY=zo2_is_mezo_one_update_late`, and test_host.py."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.data import DataConfig
from jaxllm.models import functional
from jaxllm.optim import ScheduleConfig
from jaxllm.train import RunConfig, TrainState
from jaxllm.train.host_offload import HostConfig
from jaxllm.train.step.step_builder import settle_function, step_links
from jaxllm.train.step.step_chain import saved_state
from jaxllm.train.step.zo2 import PENDING
from tests import tiny
from tests.optim.kinds import named

AWAY = HostConfig(params=True)


def run_of(host: HostConfig, dtype: str = "float64") -> RunConfig:
    optim = named("mezo", schedule=ScheduleConfig("constant", peak=1e-3, warmup=0.0), weight_decay=0.1)
    model = tiny.decoder(dtype=dtype, embed_dim=8, heads=2, kv_heads=1, head_dim=4, mlp=8, layers=3, remat="full")
    data = DataConfig(batch_size=2, seq_len=8)
    return RunConfig(model=model, optim=optim, steps=10, mesh="dp", data=data, host=host)


def test_the_pending_update_is_not_saved():
    run = run_of(AWAY)
    links = step_links(run)
    assert [link.name for link in links if link.transient] == [PENDING]
    state = TrainState({}, {}, 0, 0, {PENDING: 1, "ema": 2})
    assert saved_state(state, links).extras == {"ema": 2}
    assert settle_function(run_of(HostConfig()), functional(run.model)) is None
    sgd = replace(run, optim=named("lomo"))
    assert settle_function(sgd, functional(run.model)) is None
    assert not step_links(sgd)
