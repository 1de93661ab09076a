"""Formulas of host offload: against brute force, and against the compiler."""

from __future__ import annotations

import dataclasses

import pytest

from jaxllm.models import functional
from jaxllm.plan import plan_view
from jaxllm.plan.formulas import memory_estimate
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.offload_time import LayerUpdateTime, block_bytes, device_every, largest_share, update_seconds
from jaxllm.plan.hardware import Cluster, HardwareError
from jaxllm.plan.interleave import fastest_interleave, stride
from jaxllm.plan.layout_search import predict_layout
from jaxllm.train import RunConfig
from jaxllm.train.host_offload import HostConfig
from jaxllm.train.run import fitting_mesh
from recipes.llama3 import llama3_8b
from sharding import MeshSpec
from sharding.topology import Topology

MESH = "fsdp=8"


def run(**fields) -> RunConfig:
    config = llama3_8b()
    model = dataclasses.replace(config.model, remat=fields.pop("remat", "full"))
    data = dataclasses.replace(config.data, batch_size=8, seq_len=4096)
    return dataclasses.replace(config, model=model, data=data, accumulate=1, mesh=MESH, **fields)


def layout(config: RunConfig, on: str = "h100:1x8"):
    mesh = fitting_mesh(config, functional(config.model, config.parallel.rules()), 8)
    return predict_layout(config, mesh, Cluster.parse(on))


def test_the_stride_is_where_link_and_host_are_even():
    layer = LayerUpdateTime(state=6.0, gradients=1.0, host=3.0)
    assert device_every(layer, 400) == 4
    assert update_seconds(layer, 4, 4) == 9.0 == 6 + 3 * 1.0
    assert device_every(LayerUpdateTime(state=1.0, gradients=1.0, host=100.0), 32) == 1
    assert device_every(LayerUpdateTime(state=2.0, gradients=1.0, host=0.5), 32) == 32
    # By hand, of three layers: 3 x 6; 6 and 9 of two groups; 6 and 2 of the link beside 6 of the host.
    assert [update_seconds(layer, 3, n) for n in (1, 2, 3)] == [18.0, 7.0 + 6.0, 8.0]


def makespan(layer: LayerUpdateTime, layers: int, every: int) -> float:
    """Update of all layers as a queue of events: link in, link out and host each do one thing at a time.

    A group's copies may start when the group before has begun, as the next state is fetched one group ahead; within a
    group the host can begin a layer as soon as its gradients are there.
    """
    sent = returned = computed = 0.0
    for first in range(0, layers, every):
        on_host = every - 1 if first + every <= layers else 0
        steps = 1 if first + every <= layers else layers - first
        for _ in range(steps):
            sent += layer.state
            returned = returned + layer.state
        for _ in range(on_host):
            sent += layer.gradients
            computed = computed + layer.host
            returned = returned + layer.gradients / 2
        sent = returned = computed = max(sent, returned, computed)
    return sent


def test_the_interleave_is_that_of_the_shortest_makespan(rng):
    """The stride of the balance, against every stride played as events."""
    for _ in range(40):
        state, gradients, host = rng.uniform(0.1, 10, 3)
        layers = int(rng.integers(1, 130))
        layer = LayerUpdateTime(state, gradients, host)
        spans = {every: makespan(layer, layers, every) for every in range(1, layers + 1)}
        found = stride(layer, layers)
        assert spans[found] == pytest.approx(min(spans.values()), rel=1e-12)
        assert found == device_every(layer, layers) or spans[found] == pytest.approx(spans[device_every(layer, layers)])


def test_the_interleave_of_a_run():
    cluster, away = Cluster.parse("h100:1x8"), run(host=HostConfig(optimizer=True))
    found = fastest_interleave(away, cluster)
    assert f"fastest by formula: {found.device_every}" in plan_view.explained(layout(away), cluster)
    # Float32 gradients and parameters are as many bytes as the state, so the host's processor does not help.
    assert found.layer.state == found.layer.gradients
    assert (found.device_every, found.seconds) == (1, found.device_seconds)
    with pytest.raises(HardwareError, match=r"hosts of v5p is not published; give a hardware file with \[v5p\]"):
        fastest_interleave(run(), Cluster.parse("v5p:2x2x2"))


def test_the_share_is_what_a_forward_pass_hides():
    assert largest_share(10.0, 40.0, seconds=3.0, host=10.0) == 0.5
    assert largest_share(10.0, 40.0, seconds=0.5, host=10.0) == 0.0
    assert largest_share(10.0, 40.0, seconds=9.0, host=10.0) == 1.0


def test_state_on_the_host_is_not_on_the_device():
    here, there = (
        memory_estimate.predict(run(host=HostConfig(optimizer=o)), MeshSpec.parse(MESH), Topology.parse("h100:1x8"))
        for o in (False, True)
    )
    layers = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336 + 2 * 4096)
    assert there.host == pytest.approx(2 * 4 * layers / 8, rel=1e-3)
    assert here.optimizer - there.optimizer == pytest.approx(there.host, abs=8)
    assert here.total - there.total == pytest.approx(there.host * (1 - 3 / 32), rel=1e-3)


def test_a_persistent_share_stays_on_the_device():
    """Of both moments of a layer's 218 M numbers a third has room for two of the 58.7 M and four smaller matrices."""
    mesh, topology = MeshSpec.parse(MESH), Topology.parse("h100:1x8")
    none, third = (run(host=HostConfig(optimizer=True, persistent=share)) for share in (0.0, 1 / 3))
    there, found = (memory_estimate.predict(one, mesh, topology) for one in (none, third))
    # 2 x 218.1 / 3 = 145.4 M: two of gate, up and down (117.4), one of q and o (16.8), two of k and v (8.4), norms.
    stays = 4 * 32 * (2 * 4096 * 14336 + 4096 * 4096 + 2 * 4096 * 1024 + 2 * 2 * 4096) / 8
    assert there.host - found.host == pytest.approx(stays, rel=1e-3)
    assert found.optimizer - there.optimizer == there.host - found.host
    seconds = [layout(one).time.host for one in (none, third)]
    assert seconds[1] / seconds[0] == pytest.approx(found.host / there.host, rel=1e-3)
    said = plan_view.explained(layout(third), Cluster.parse("h100:1x8"))
    assert "optimizer state of layers: 33% persistent on the device, the rest streamed; one of 1 updated" in said


def test_activations_on_the_host_are_what_the_formula_says():
    """Per device 4,096 tokens: two streams, attention's output and sums; q, k, v, gate and up."""
    found = memory_estimate.predict(run(remat="offload"), MeshSpec.parse(MESH), Topology.parse("h100:1x8"))
    numbers = 3 * 4096 + 4096 + 2 * 1024 + 2 * 14336
    assert found.host == 32 * 4096 * (2 * numbers + 4 * 32)
    half = memory_estimate.predict(run(remat="offload:0.5"), MeshSpec.parse(MESH), Topology.parse("h100:1x8"))
    assert found.host - half.host == pytest.approx(32 * 4096 * (4096 + 2 * 1024 + 2 * 14336))
    work = DeviceWork.of(run(remat="offload"), MeshSpec.parse(MESH))
    ((block, count),) = work.blocks.items()
    assert count * sum(block_bytes(work, block)) == found.host


def test_what_lives_where_is_said():
    config = run(remat="offload:0.5", host=HostConfig(optimizer=True, device_every=2))
    text = plan_view.explained(layout(config), Cluster.parse("h100:1x8"))
    assert "in the memory of its host" in text
    assert "activations: matmul outputs of 50% of the tokens; a forward pass hides" in text
    assert "one of 2 updated on the device; fastest by formula:" in text
    slower, plain = layout(config), layout(run(remat="elementwise"))
    assert slower.time.host > 0 == plain.time.host
    assert slower.memory.total < plain.memory.total
