"""Links measured between units: who sends to whom, figures of each pair, and a file that the planner reads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import cli
from jaxllm.plan.unequal import link_benchmark
from jaxllm.plan.unequal.link_benchmark import LinkRates, exchange, measure_links, partners
from jaxllm.plan.unequal.unequal_cluster import read_cluster
from tests.plan.test_unequal import NETWORK, NEW, OLD


def test_messages_reach_the_same_place_of_the_other_unit():
    assert partners(0, 2, 2) == [(0, 4), (1, 5), (4, 0), (5, 1)]
    assert partners(1, 1, 4) == [(4, 5), (6, 7), (5, 4), (7, 6)]
    assert partners(1, 1, 1) == []
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("device",))
    x = jnp.arange(16.0).reshape(8, 2)
    once, twice = (np.asarray(exchange(mesh, partners(1, 3, 2), turns)(x)) for turns in (1, 2))
    np.testing.assert_array_equal(once[[2, 3, 6, 7]], np.asarray(x)[[6, 7, 2, 3]])
    np.testing.assert_array_equal(twice[[2, 3, 6, 7]], np.asarray(x)[[2, 3, 6, 7]])
    assert not once[[0, 1, 4, 5]].any()


def test_rates_are_bytes_over_the_time_of_a_message(monkeypatch):
    """With a clock that a program of n messages moves on by 5 + n x its bytes / rate of its pair."""
    now = [0.0]

    def program(mesh, pairs, turns):
        a, b = pairs[0]

        def run(x):
            now[0] += 5 + turns * x.shape[1] * 4 / (100.0 if a // 2 == b // 2 else 10.0 * (1 + a // 2 + b // 2))

        return run

    monkeypatch.setattr(link_benchmark, "exchange", program)
    monkeypatch.setattr(link_benchmark.time, "perf_counter", lambda: now[0])
    devices = jax.devices()
    said: list[str] = []
    found = measure_links([devices[:2], devices[2:4], devices[4:6]], ["a", "b", "c"], 400, said.append)
    np.testing.assert_allclose(found.bandwidth, [[100, 20, 30], [20, 100, 40], [30, 40, 100]])
    np.testing.assert_allclose(found.latency[0], [4 / 100, 4 / 20, 4 / 30])
    assert len(said) == 6
    with pytest.raises(ValueError, match="equal units"):
        measure_links([devices[:2], devices[2:3]], ["a", "b"])


def test_the_planner_reads_what_was_measured(tmp_path):
    """Bandwidths of pairs of nodes, in place of those that were typed in."""
    file = tmp_path / "cluster.toml"
    file.write_text(NEW + OLD + NETWORK + "[between]\ndefault = 1e9\n")
    cluster = read_cluster(file)
    names = tuple(cluster.describe(unit) for unit in range(len(cluster.units)))
    many = len(names)
    rates = tuple(tuple(np.inf if a == b else 1e9 + a + b for a in range(many)) for b in range(many))
    measured = LinkRates(names, rates, rates)
    file.write_text(NEW + OLD + NETWORK + measured.toml() + "\n")
    np.testing.assert_allclose(read_cluster(file).links, rates, rtol=1e-3)
    *rows, star = measured.table().splitlines()
    assert len(rows) == 1 + many * (many + 1) // 2
    assert f"--star-bytes {measured.star_limit()}" in star


@pytest.mark.drawn(3)
def test_the_command_line_measures_this_machine(capfd):
    assert cli.main(["bench", "--links", "--units", "4", "--message", "1MiB"]) == 0
    said = capfd.readouterr().out
    assert said.count("node.") >= 4
    assert '"node.0 node.1" = ' in said
    for units in ("3", "0", "1"):
        assert cli.main(["bench", "--links", "--units", units]) == 2
        assert "8 devices" in capfd.readouterr().err
