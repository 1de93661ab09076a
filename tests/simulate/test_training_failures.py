"""Training runs whose hosts fail: the simulation against formulas."""

from __future__ import annotations

import dataclasses
import math

import pytest

from jaxllm.simulate.training_failures import DAY, FailingCluster, FailingRun, Recovery

CLUSTER = FailingCluster(hosts=1250, failures=8 * 4.7e-4 / DAY, hangs=0.0, repair=DAY, spares=10**6)
DISK = Recovery(every=1800.0, save=60.0, crash=0.0, hang=0.0, restart=600.0)


@pytest.mark.parametrize(("every", "restart"), [(1800.0, 600.0), (7200.0, 600.0), (900.0, 5000.0)])
def test_restarts_from_disk_are_dalys_formula(every, restart):
    """Daly, "A higher order estimate of the optimum checkpoint interval", 2006, equation 13."""
    recovery = dataclasses.replace(DISK, every=every, restart=restart)
    spent = FailingRun(CLUSTER, recovery, seed=1).run(4000 * DAY)
    mean = 1 / (CLUSTER.failures * CLUSTER.hosts)
    segment = mean * math.exp(restart / mean) * math.expm1((every + recovery.save) / mean)
    assert spent.goodput == pytest.approx(every / segment, rel=0.01)
    assert spent.missing == spent.waiting == 0.0


def test_times_are_the_whole_run():
    run = FailingRun(dataclasses.replace(CLUSTER, spares=3, hangs=0.3), dataclasses.replace(DISK, hang=1800.0), seed=2)
    spent = run.run(400 * DAY)
    assert 400 * DAY <= spent.total < 410 * DAY
    assert min(spent.progress, spent.repeated, spent.saving, spent.noticing, spent.restarting, spent.waiting) > 0
    # No host fails while the others wait, so failures are those of the rest of the time.
    want = CLUSTER.failures * CLUSTER.hosts * (spent.total - spent.waiting)
    assert run.failures == pytest.approx(want, rel=0.1)
    assert spent.noticing == pytest.approx(0.3 * run.failures * 1800.0, rel=0.15)


def test_an_elastic_run_lacks_the_hosts_that_are_repaired():
    cluster = dataclasses.replace(CLUSTER, hosts=100, failures=1 / (10 * DAY), repair=DAY, spares=0)
    recovery = Recovery(every=10.0, save=0.0, crash=0.0, hang=0.0, restart=0.0, elastic=True)
    spent = FailingRun(cluster, recovery, seed=3).run(3000 * DAY)
    # Each host works for ten days and is repaired for one, whatever the others do.
    assert spent.goodput == pytest.approx(10 / 11, rel=0.01)
    assert spent.goodput + spent.missing / spent.total == pytest.approx(1, abs=1e-2)


def test_a_run_without_failures_only_saves():
    spent = FailingRun(dataclasses.replace(CLUSTER, failures=1e-30), DISK).run(100 * 1860.0)
    assert spent.goodput == pytest.approx(1800 / 1860)


def test_a_run_of_one_host_that_waits_for_its_repair():
    cluster = FailingCluster(hosts=1, failures=1 / DAY, hangs=1.0, repair=DAY)
    for elastic in (False, True):
        recovery = Recovery(every=1.0, save=0.0, crash=0.0, hang=60.0, restart=0.0, elastic=elastic)
        spent = FailingRun(cluster, recovery, seed=4).run(4000 * DAY)
        assert spent.goodput == pytest.approx(0.5, rel=0.05)


def test_hosts_that_return_during_a_restart_are_taken_in():
    cluster = dataclasses.replace(CLUSTER, hosts=20, failures=1 / DAY, repair=300.0, spares=0)
    recovery = Recovery(every=10.0, save=0.0, crash=1.0, hang=1.0, restart=600.0, elastic=True, rejoin=5.0)
    spent = FailingRun(cluster, recovery, seed=5).run(200 * DAY)
    assert spent.missing / spent.total < 20 * 300.0 / DAY
    assert spent.goodput > 0.8
