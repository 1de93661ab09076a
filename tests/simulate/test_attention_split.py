"""Attention pools on paper devices: the time of a step, memory of both parts, and splits of devices."""

from __future__ import annotations

import dataclasses

import pytest

from jaxllm.infer.attention_pool.transfer_bytes import transfer_bytes
from jaxllm.infer.pools.pool_argument import AttentionPoolSizes
from jaxllm.plan.formulas.serving_step import BatchWork
from jaxllm.plan.hardware import Cluster
from jaxllm.simulate import DeploymentError, ServiceObjective, make_trace, simulate
from jaxllm.simulate.attention_split import (
    OffloadedDeployment,
    OffloadedStepModel,
    attention_splits,
    mixed_attention_splits,
    split_of,
)
from jaxllm.simulate.search.pool_search import spent
from jaxllm.simulate.simulation_report import text_report
from tests.infer import engines
from tests.simulate.served import MODEL, deployment

H100, A100 = (Cluster.parse(f"{name}:1x1").hardware for name in ("h100", "a100"))
BATCH = BatchWork.of([300, 200], [1, 1])


def split(tensor: int = 1, devices: int = 2, **fields) -> OffloadedDeployment:
    sizes = {name: fields.pop(name) for name in ("overlap", "kv_dtype", "model", "pages") if name in fields}
    found = split_of(deployment(**sizes), H100, tensor, A100, devices, **fields)
    assert found is not None
    return found


def model_of(one: OffloadedDeployment) -> OffloadedStepModel:
    assert isinstance(one.step_model, OffloadedStepModel)
    return one.step_model


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_a_step_is_both_parts_and_the_transfers(axis):
    """Attention: 4 layers of 502 tokens, 2 x 8 heads x 64 FLOPs a pair, 2 x 4 x 32 x 2 bytes a token, half a device."""
    one = split(axis=axis, link=1e9)
    model, whole = model_of(one), deployment().step_model
    away = model.attention_part(BATCH)
    assert away.flops == 4 * 502 * 2 * 8 * 64 / 2
    assert away.bytes == 4 * 502 * 2 * 4 * 32 * 2 / 2
    assert away.compute + away.memory == pytest.approx(away.bytes / (A100.bandwidth * model.calibration.memory))
    size = sum(transfer_bytes(MODEL, AttentionPoolSizes(1, 2, axis), 2, 2))
    assert size == 4 * 2 * 2 * ((2 if axis == "context" else 1) * (8 + 4 + 4) * 32 + 8 * 32)
    sent = model.transfer_part(2)
    assert sent.seconds == pytest.approx(size / (1e9 * model.calibration.link) + 8 * max(H100.hop, A100.hop))
    own = whole.step([BATCH], 2, 2) + whole._attention(BATCH, 1) * -1
    total = model.step([BATCH], 2, 2)
    launches = 4 * (away.launch / 4 - whole._launch)
    assert total.seconds == pytest.approx(own.seconds + away.compute + away.memory + sent.seconds + launches)


def test_halves_hide_the_shorter_part():
    """Both halves: no less than either part alone, no more than one after the other."""
    whole, halves = (model_of(split(overlap=overlap)) for overlap in ("none", "nano"))
    batch = BatchWork.of([400] * 16, [1] * 16)
    half, head = halves.weights_part(8, 16) + halves._head(16) * -1, halves._head(16)
    away = halves.attention_part(batch) * 0.5 + halves.transfer_part(8)
    found = halves.step([batch], 16, 16)
    most = 2 * (half.seconds + away.seconds) + head.seconds
    assert 2 * max(half.seconds, away.seconds) + head.seconds < found.seconds < most
    assert found.flops == pytest.approx(whole.step([batch], 16, 16).flops)


def test_attention_devices_have_all_pages_and_no_weights():
    near, far = split(pages=None), split(devices=4, pages=None)
    assert near.spec.pages[0] < far.spec.pages[0]
    assert near.step_model.token_bytes == 4 * 2 * 2 * 32 * 2
    assert split(axis="context").step_model.token_bytes == 4 * 2 * 4 * 32 * 2 / 2
    big = dataclasses.replace(MODEL, embed_dim=32768, vocab_size=2_000_000)
    with pytest.raises(DeploymentError, match="give the weights more devices"):
        _ = split(model=big, pages=None).spec


def test_what_cannot_be_split_is_named():
    with pytest.raises(DeploymentError, match="8 heads and 4 of keys and values do not divide over 16"):
        _ = split(devices=16).step_model
    with pytest.raises(DeploymentError, match="not spread over context"):
        _ = split(model=engines.model_of("deepseek_v3", "float32"), axis="context").step_model
    with pytest.raises(DeploymentError, match="attention devices: give both"):
        OffloadedDeployment(*(getattr(deployment(), name) for name in ("model", "cluster", "mesh")))


def test_the_engine_decodes_one_token_a_step():
    """It is the engine's own scheduler with pools; prices are of both kinds of devices."""
    h100, a100 = (dataclasses.replace(one, dollars_per_hour=price) for one, price in ((H100, 3.0), (A100, 1.0)))
    one = split_of(deployment(), h100, 1, a100, 2, copies=2)
    assert one is not None
    assert (one.engines, one.devices, one.dollars_per_hour, spent(one, "cost")) == (2, 6, 10.0, 10.0)
    found = simulate(one, make_trace("poisson:400", lengths="100/20", count=10))
    assert sum(len(own) > 0 for own in found.engines) == 2
    assert not any(step.decode for own in found.engines for step in own)
    assert [each.result.tokens for each in found.requests] == [20] * 10
    figures = found.figures(ServiceObjective(1.0, 0.05))
    assert figures["devices"] == 6
    first = text_report(found, figures).splitlines()[0]
    assert first.endswith(f"on 2 x {h100.name} and 4 x {a100.name}, {found.trace.name}"), "devices of both parts"
    assert figures["kilowatt_hours"] is None


def test_splits_use_the_devices():
    found = [
        (*(count // one.copies for _, count in one.kinds), one.copies)
        for one in attention_splits(deployment("h100:1x4"))
    ]
    assert found == [(1, 1, 2), (1, 2, 1), (2, 1, 1), (2, 2, 1)]
    mixed = list(mixed_attention_splits(deployment(), [H100, A100], 4))
    assert len({one.name + str(one.kinds) for one in mixed}) == len(mixed) == 4 * (2 + 1 + 1 + 1)
    assert max(one.devices for one in mixed) == 4
