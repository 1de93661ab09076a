"""Device peaks by jax's device kinds."""

from __future__ import annotations

import pytest

from jaxllm.compiler.device_peaks import clock_of, peak_of
from sharding.topology import GENERATIONS

CHIPS = {"v4": 275e12, "v5e": 197e12, "v5p": 459e12, "v6e": 918e12, "tpu7x": 2307e12}
"""FLOP/s of a whole chip, as its maker gives them."""


@pytest.mark.parametrize("name", CHIPS)
def test_a_chip_of_several_devices_is_divided_among_them(name):
    kind = GENERATIONS[name]
    found = peak_of(kind.device_kind)
    assert found is not None
    assert found.flops * kind.devices_per_chip == CHIPS[name]


@pytest.mark.parametrize(
    ("kind", "flops", "bandwidth"),
    [
        ("TPU v5p", 459e12, 2.765e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 3.352e12),
        ("NVIDIA H200", 989e12, 4.8e12),
        ("NVIDIA B200", 2250e12, 7.672e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 2.039e12),
        ("NVIDIA GeForce RTX 3090", 71e12, 0.936e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 1.008e12),
        ("NVIDIA A10G", 70e12, 0.6e12),
        ("NVIDIA L4", 121e12, 0.3e12),
    ],
)
def test_kinds_by_their_beginning(kind, flops, bandwidth):
    assert peak_of(kind) == (flops, bandwidth)


@pytest.mark.parametrize(
    "kind",
    ["NVIDIA L40S", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 D", "NVIDIA A100-SXM4-40GB", "NVIDIA A10"],
)
def test_other_devices_whose_names_begin_alike_have_none(kind):
    assert peak_of(kind) is None


def test_every_accelerator_of_the_topologies_has_one_and_others_none():
    assert all(peak_of(g.device_kind) for g in GENERATIONS.values() if g.platform != "cpu")
    assert peak_of("cpu") is None


@pytest.mark.parametrize("name", CHIPS)
def test_clocks_are_those_of_the_peaks(name):
    """A cycle's FLOPs are a whole number of matrix units'."""
    kind = GENERATIONS[name].device_kind
    peak, clock = peak_of(kind), clock_of(kind)
    assert peak is not None
    assert clock is not None
    units = peak.flops / clock / (2 * 128 * 128)
    assert round(units) in (4, 8, 16)
    assert units == pytest.approx(round(units), rel=3e-3)
    assert clock_of("NVIDIA H100 80GB HBM3") is None
