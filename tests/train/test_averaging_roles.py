"""Roles of peers by bandwidth: shares and who computes, against messages that are sent, bisection and brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from jaxllm.train.outer.averaging_roles import (
    AveragingPeer,
    averaging_roles,
    averaging_seconds,
    averaging_shares,
    uniform_shares,
)

SIZE = 1e8


def drawn(seed: int, most: int = 12) -> list[AveragingPeer]:
    """Two peers or more with bandwidths over three orders of magnitude; some only average, some cannot be reached."""
    rng = np.random.default_rng(seed)
    peers = [
        AveragingPeer(
            float(10 ** rng.uniform(6, 9)),
            float(10 ** rng.uniform(6, 9)),
            float(rng.choice([0, 1, 5, 20], p=[0.2, 0.2, 0.3, 0.3])),
            bool(rng.random() < 0.8),
        )
        for _ in range(rng.integers(2, most + 1))
    ]
    steady = AveragingPeer(float(10 ** rng.uniform(6, 9)), float(10 ** rng.uniform(6, 9)), 5.0)
    return [*peers[1:], steady]


def sent_seconds(
    peers: list[AveragingPeer], shares: tuple[float, ...], computes: tuple[bool, ...], values: int = 20000
) -> tuple[float, float]:
    """Averages random gradients by messages, as the roles say: seconds of the busiest link, error of the means."""
    rng = np.random.default_rng(0)
    gradients = {n: rng.normal(size=values) for n, one in enumerate(computes) if one}
    ends = np.rint(np.cumsum([0.0, *shares]) * values).astype(int)
    up, down = np.zeros(len(peers)), np.zeros(len(peers))
    results = np.full((len(peers), values), np.nan)
    for owner, part in enumerate(map(slice, ends[:-1], ends[1:])):
        total = np.zeros(part.stop - part.start)
        for sender, gradient in gradients.items():
            message = gradient[part]
            total += message
            if sender != owner:
                up[sender] += message.size
                down[owner] += message.size
        mean = total / len(gradients)
        for receiver in range(len(peers)):
            results[receiver, part] = mean
            if receiver != owner:
                up[owner] += mean.size
                down[receiver] += mean.size
    error = np.abs(results - np.mean(list(gradients.values()), axis=0)).max()
    busiest = max(
        SIZE / values * max(up[n] / peer.upload, down[n] / peer.download) for n, peer in enumerate(peers)
    )  # fmt: skip
    return busiest, float(error)


def bisected(peers: list[AveragingPeer], computes: tuple[bool, ...]) -> float:
    """Least seconds of a round: the time at which the largest shares that it allows each peer add up to the whole."""

    def largest(peer: AveragingPeer, own: bool, seconds: float) -> float:
        """Share that is at most so large; nan where the time is too short, whatever the share."""
        low, high = 0.0, 1.0 if peer.reachable else 0.0
        others, senders = len(peers) - 1, sum(computes) - own
        # Bytes are start + (end - start) share.
        for start, end, bandwidth in [(float(own), others, peer.upload), (1.0, senders, peer.download)]:
            limit = bandwidth * seconds / SIZE
            if end > start:
                high = min(high, (limit - start) / (end - start))
            elif end < start:
                low = max(low, (start - limit) / (start - end))
            elif limit < start:
                return math.nan
        return high if low <= high else math.nan

    short, long = 0.0, 1e3 * SIZE / min(min(peer.upload, peer.download) for peer in peers)
    for _ in range(200):
        middle = (short + long) / 2
        shares = [largest(peer, own, middle) for peer, own in zip(peers, computes, strict=True)]
        short, long = (short, middle) if sum(shares) >= 1 else (middle, long)
    return long


def plan_errors(seed: int) -> dict[str, float]:
    """Time of the planned shares over the least by bisection, over an all-reduce's and the best parameter server's."""
    peers = drawn(seed)
    computes = tuple(peer.rows > 0 for peer in peers)
    shares = averaging_shares(peers, SIZE)
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= 0
    assert not any(share for peer, share in zip(peers, shares, strict=True) if not peer.reachable)
    planned, wrong = sent_seconds(peers, shares, computes)
    assert wrong < 1e-12
    seconds = averaging_seconds(peers, shares, SIZE)
    # The messages have whole numbers of values.
    servers = [
        averaging_seconds(peers, tuple(float(n == one) for n in range(len(peers))), SIZE)
        for one, peer in enumerate(peers)
        if peer.reachable
    ]
    return {
        "messages": abs(planned / seconds - 1),
        "bisection": abs(seconds / bisected(peers, computes) - 1),
        "all-reduce": seconds / averaging_seconds(peers, uniform_shares(peers), SIZE),
        "server": seconds / min(servers),
    }


def grid_error(seed: int) -> float:
    """Relative error of the planned time of two or three peers, against grids of shares around the best until then."""
    peers = drawn(seed, most=3)
    computes = tuple(peer.rows > 0 for peer in peers)
    middle, width = np.full(len(peers) - 1, 0.5), 0.5
    best = math.inf
    for _ in range(40):
        axes = [np.linspace(max(at - width, 0), min(at + width, 1), 21) for at in middle]
        for point in itertools.product(*axes):
            shares = (*point, max(1 - sum(point), 0.0))
            if sum(point) > 1 or any(share and not peer.reachable for peer, share in zip(peers, shares, strict=True)):
                continue
            seconds = 0.0
            for peer, own, share in zip(peers, computes, shares, strict=True):
                up = own * (1 - share) + (len(peers) - 1) * share
                down = (sum(computes) - own) * share + 1 - share
                seconds = max(seconds, SIZE * up / peer.upload, SIZE * down / peer.download)
            if seconds < best:
                best, middle = seconds, np.asarray(point)
        width *= 0.6
    return abs(averaging_seconds(peers, averaging_shares(peers, SIZE), SIZE) / best - 1)


def roles_error(seed: int) -> float:
    """Relative error of the step's time under the chosen roles, against all sets; no peer more could compute."""
    peers = drawn(seed, most=6)
    batch = int(np.random.default_rng(seed).choice([1, 100, 10000]))
    plan = averaging_roles(peers, SIZE, batch)
    times: dict[tuple[bool, ...], float] = {}
    for computes in itertools.product([False, True], repeat=len(peers)):
        rows = sum(peer.rows for peer, own in zip(peers, computes, strict=True) if own)
        if rows and all(peer.rows for peer, own in zip(peers, computes, strict=True) if own):
            times[computes] = max(bisected(peers, computes), batch / rows)
    best = min(times.values())
    for one, own in enumerate(plan.computes):
        more = (*plan.computes[:one], True, *plan.computes[one + 1 :])
        assert own or times.get(more, math.inf) > best * (1 + 1e-10), "one more could compute"
    assert plan.averaging == averaging_seconds(peers, plan.shares, SIZE, plan.computes)
    return abs(plan.seconds / best - 1)


@pytest.mark.parametrize("seed", range(3))
def test_plans_are_fastest(seed):
    errors = plan_errors(seed)
    assert errors["messages"] <= 1e-2
    assert errors["bisection"] <= 1e-6
    assert max(errors["all-reduce"], errors["server"]) <= 1 + 1e-6


def test_the_plan_of_a_grid():
    assert grid_error(5) <= 1e-6


@pytest.mark.parametrize("seed", [0, 1, 122431197])  # with the last, many choices are equally fast
def test_roles_are_those_of_brute_force(seed):
    assert roles_error(seed) <= 1e-6


@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_equal_peers_have_equal_shares(number):
    peers = [AveragingPeer(2e7, 1e8, 3.0)] * number
    assert averaging_shares(peers, SIZE) == pytest.approx([1 / number] * number, abs=1e-7)
    plan = averaging_roles(peers, SIZE, 1000)
    assert plan.computes == (True,) * number  # all are needed for so large a batch
    # An all-reduce sends 2 (n - 1) / n of the bytes, and its upload is slower here.
    assert plan.averaging == pytest.approx(2 * (number - 1) / number * SIZE / 2e7)
    assert plan.computing == pytest.approx(1000 / 3 / number)
    assert plan.seconds == max(plan.averaging, plan.computing)


def test_shares_follow_peers_and_not_units():
    peers = drawn(11)
    shares = averaging_shares(peers, SIZE)
    turned = averaging_shares([*peers[1:], peers[0]], SIZE)
    assert [*turned[-1:], *turned[:-1]] == pytest.approx(shares, abs=1e-6)
    scaled = [AveragingPeer(8 * peer.upload, 8 * peer.download, peer.rows, peer.reachable) for peer in peers]
    assert averaging_shares(scaled, 3 * SIZE) == pytest.approx(shares, abs=1e-6)
    assert averaging_seconds(scaled, shares, 3 * SIZE) == pytest.approx(3 / 8 * averaging_seconds(peers, shares, SIZE))


def test_a_fast_peer_that_computes_nothing_is_a_parameter_server():
    peers = [*[AveragingPeer(1e7, 1e7, 1.0)] * 4, AveragingPeer(1e9, 1e9, 0.0)]
    shares = averaging_shares(peers, SIZE)
    assert shares == pytest.approx([0, 0, 0, 0, 1], abs=1e-6)
    assert averaging_seconds(peers, shares, SIZE) == pytest.approx(10.0)


def test_a_slow_link_to_a_fast_computer_stays_out_only_if_that_is_faster():
    # The one that averages for two others may compute too: at 4 rows a second for a batch of 40 it must.
    peers = [AveragingPeer(1e8, 1e8, 1.0, False), AveragingPeer(1e8, 1e8, 1.0, False), AveragingPeer(1e8, 1e8, 2.0)]
    assert averaging_roles(peers, SIZE, 40).computes == (True, True, True)
    assert averaging_roles(peers, SIZE, 40).seconds == pytest.approx(10.0)


FAST = AveragingPeer(1e8, 1e8)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: AveragingPeer(0.0, 1e8), "upload = 0.0"),
        (lambda: AveragingPeer(1e8, math.inf), "download = inf"),
        (lambda: AveragingPeer(1e8, 1e8, -1.0), "rows = -1.0"),
        (lambda: averaging_shares([AveragingPeer(1e8, 1e8, 1.0, False)] * 2, SIZE), "none of 2 peers can be reached"),
        (lambda: averaging_shares([], SIZE), "none of 0 peers"),
        (lambda: averaging_shares([FAST, FAST], 0.0), "size = 0.0"),
        (lambda: averaging_shares([FAST, FAST], SIZE, [True]), r"computes = \[True\]"),
        (lambda: averaging_roles([AveragingPeer(1e8, 1e8, 0.0)], SIZE, 8), "one must compute"),
        (lambda: averaging_roles([FAST, FAST], SIZE, 0), "batch = 0"),
        (lambda: averaging_seconds([FAST, FAST], [0.5, 0.4], SIZE), r"shares = \[0.5, 0.4\]"),
        (
            lambda: averaging_seconds([FAST, AveragingPeer(1e8, 1e8, 1.0, False)], [0.5, 0.5], SIZE),
            "peer 1 has a share",
        ),
    ],
)
def test_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
