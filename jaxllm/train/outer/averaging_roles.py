"""Averaging roles by bandwidth: peers that compute gradients, and the share of them that each peer averages.

DeDLOC (arXiv:2106.10207, section 3.2) chooses the roles by a linear program. Peers whose upload and download bandwidths
differ average gradients in this way: each peer that computes gradients sends every other peer that peer's share of
them, and each peer sends the mean of its share to all others. All of this goes on at once, so a round takes as long as
the slowest direction of a peer's link:

    upload      (1 - w) P of own gradients, if it computes some, and (n - 1) w P of means
    download    w P from each other peer that computes gradients, and (1 - w) P of means

where w is the peer's share. Equal shares are an all-reduce, and one share of 1 is a parameter server. A peer that only
averages is a server of BytePS. A peer that others cannot reach, behind a firewall, averages nothing.

The paper's variables are rates between pairs of peers; of these, shares are those that all peers agree on. Bandwidths
of single pairs are not limited here. Training itself averages by the compiler's collectives: this only plans.

Legend: n peers, P bytes of gradients, w shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SLACK = 1e-9
"""Relative rounding that the second linear program allows the time of the first."""


@dataclass(frozen=True)
class AveragingPeer:
    """Peer that computes or averages gradients.

    Attributes:
        upload, download: bandwidth, bytes per second.
        rows: rows of a batch for which it can compute gradients, per second; 0: it only averages.
        reachable: others can open connections to it, so that it can average.

    Raises:
        ValueError: a number is not finite, a bandwidth is not positive, or rows are negative.
    """

    upload: float
    download: float
    rows: float = 1.0
    reachable: bool = True

    def __post_init__(self) -> None:
        for name in ("upload", "download"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"averaging: {name} = {value}; give a peer's bandwidth in bytes per second, above 0.")
        if not 0 <= self.rows < math.inf:
            raise ValueError(
                f"averaging: rows = {self.rows}; give rows per second, or 0 for a peer that only averages."
            )


@dataclass(frozen=True)
class AveragingPlan:
    """Roles of peers.

    Attributes:
        computes: peers that compute gradients.
        shares: share of the gradients that each peer averages; their sum is 1.
        averaging: seconds of a round of averaging.
        computing: seconds until these peers have computed a global batch.
    """

    computes: tuple[bool, ...]
    shares: tuple[float, ...]
    averaging: float
    computing: float

    @property
    def seconds(self) -> float:
        """Seconds of a step of the optimizer, where the next batch is computed while gradients are averaged."""
        return max(self.averaging, self.computing)


def uniform_shares(peers: Sequence[AveragingPeer]) -> tuple[float, ...]:
    """Equal shares of all peers that can be reached: an all-reduce."""
    _check_peers(peers)
    number = sum(peer.reachable for peer in peers)
    return tuple(peer.reachable / number for peer in peers)


def averaging_seconds(
    peers: Sequence[AveragingPeer], shares: Sequence[float], size: float, computes: Sequence[bool] | None = None
) -> float:
    """Seconds of a round of averaging.

    Args:
        peers: who take part.
        shares: share of the gradients that each peer averages.
        size: bytes of the gradients.
        computes: peers that compute gradients; None: all that can.

    Raises:
        ValueError: the shares are no shares of these peers, or no peer computes.
    """
    computes = _computes(peers, computes)
    if len(shares) != len(peers) or min(shares) < 0 or not math.isclose(sum(shares), 1, rel_tol=1e-6):
        raise ValueError(f"averaging: shares = {list(shares)}; give {len(peers)} shares from 0 whose sum is 1.")
    if cut := [n for n, (peer, share) in enumerate(zip(peers, shares, strict=True)) if share and not peer.reachable]:
        raise ValueError(f"averaging: peer {cut[0]} has a share, but others cannot reach it; give it 0.")
    base, slope, bandwidth = _traffic(peers, computes)
    return float(((base + slope * np.repeat(shares, 2)) * size / bandwidth).max())


def averaging_shares(
    peers: Sequence[AveragingPeer], size: float, computes: Sequence[bool] | None = None
) -> tuple[float, ...]:
    """Shares with which a round of averaging is shortest, by linear programming.

    Of shares that are equally fast, those whose largest is least.

    Args:
        peers, size, computes: as in ``averaging_seconds``.

    Raises:
        ValueError: no peer can be reached, or no peer computes.
    """
    computes = _computes(peers, computes)
    _check_size(size)
    base, slope, bandwidth = _traffic(peers, computes)
    number, unit = len(peers), bandwidth.min()
    # Variables: the shares, and the time of a round at the least bandwidth of all.
    loads = np.zeros((2 * number, number + 1))
    loads[np.arange(2 * number), np.arange(2 * number) // 2] = slope * unit / bandwidth
    loads[:, -1] = -1
    first = _least_last(peers, loads, -base * unit / bandwidth)
    limit = loads[:, :-1], -base * unit / bandwidth + first[-1] * (1 + SLACK)
    largest = np.hstack([np.eye(number), -np.ones((number, 1))])
    second = np.vstack([np.hstack([limit[0], np.zeros((2 * number, 1))]), largest])
    shares = np.maximum(_least_last(peers, second, np.append(limit[1], np.zeros(number)))[:-1], 0.0)
    return tuple((shares / shares.sum()).tolist())


def averaging_roles(peers: Sequence[AveragingPeer], size: float, batch: int) -> AveragingPlan:
    """Roles with which steps of the optimizer are shortest: who computes gradients, and the shares.

    A step takes as long as computing a global batch, or as averaging the gradients of the batch before, if that is
    longer. A peer that averages for many may do so faster if it computes nothing. A mixed integer linear program
    (HiGHS) chooses who computes; then others who do not make steps longer compute too, in the order of their rows.

    Args:
        peers: who take part.
        size: bytes of the gradients.
        batch: rows of the global batch.

    Raises:
        ValueError: no peer can be reached, none can compute, or a number is not positive.
    """
    able = _computes(peers, None)
    _check_size(size)
    if batch < 1:
        raise ValueError(f"averaging: batch = {batch}; give rows of the global batch, 1 or more.")
    plan = _plan(peers, size, batch, able if len(peers) == 1 else _chosen(peers, size, batch))
    limit = plan.seconds * (1 + 10 * SLACK)
    for one in sorted(range(len(peers)), key=lambda one: -peers[one].rows):
        if able[one] and not plan.computes[one]:
            computes = (*plan.computes[:one], True, *plan.computes[one + 1 :])
            more = _plan(peers, size, batch, computes)
            plan = more if more.seconds <= limit else plan
    return plan


def _plan(peers: Sequence[AveragingPeer], size: float, batch: int, computes: tuple[bool, ...]) -> AveragingPlan:
    """Plan with the shares that are best if these peers compute."""
    shares = averaging_shares(peers, size, computes)
    computing = batch / sum(peer.rows for peer, one in zip(peers, computes, strict=True) if one)
    return AveragingPlan(computes, shares, averaging_seconds(peers, shares, size, computes), computing)


def _chosen(peers: Sequence[AveragingPeer], size: float, batch: int) -> tuple[bool, ...]:
    """Peers that compute, of two or more, so that steps are shortest; all that can, if the solver fails twice."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import lil_matrix

    number = len(peers)
    rows = np.asarray([peer.rows for peer in peers])
    unit = min(min(peer.upload, peer.download) for peer in peers)
    # Any two peers download what others average, so gradients are averaged at most as fast as both together download.
    fastest = sum(sorted(peer.download for peer in peers)[:2]) / unit
    # Variables: bytes a second of each peer's share, who computes, bytes a second of own gradients that each sends, and
    # of others that it receives, one by one, and the bytes a second of the whole gradients. Bandwidths are in units.
    share, chosen, sent = np.arange(3 * number).reshape(3, number)
    received = 3 * number + np.arange(number * number).reshape(number, number)
    rate = received[-1, -1] + 1
    terms: list[tuple[dict[int, float], float]] = []  # sums that are at most so much
    for own, peer in enumerate(peers):
        others = [other for other in range(number) if other != own]
        terms.append(({sent[own]: 1, share[own]: number - 1}, peer.upload / unit))
        terms.append(({rate: 1, share[own]: -1, **{received[own, one]: 1 for one in others}}, peer.download / unit))
        terms.append(({rate: 1, share[own]: -1, chosen[own]: fastest, sent[own]: -1}, fastest))
        terms += [({share[own]: 1, chosen[one]: fastest, received[own, one]: -1}, fastest) for one in others]
    computed = size / batch / unit  # bytes of whole gradients for each row of a batch
    terms.append(({rate: 1, **{chosen[one]: -computed * rows[one] for one in range(number)}}, 0.0))
    matrix = lil_matrix((len(terms) + 1, rate + 1))
    for row, (sums, _) in enumerate(terms):
        for column, value in sums.items():
            matrix[row, column] = value
    matrix[len(terms), share] = 1
    matrix[len(terms), rate] = -1  # the shares are the whole
    most = np.full(rate + 1, np.inf)
    most[share] = [fastest if peer.reachable else 0.0 for peer in peers]
    most[chosen] = rows > 0
    most[rate] = fastest
    kinds = np.zeros(rate + 1)
    kinds[chosen] = 1
    largest = np.asarray([bound for _, bound in terms] + [0.0])
    least = np.append(np.full(len(terms), -np.inf), 0.0)
    cost = np.zeros(rate + 1)
    cost[rate] = -1
    for presolve in (True, False):  # the solver ends with an error on a few of these programs, by either way
        found = milp(
            cost,
            constraints=[LinearConstraint(matrix.tocsr(), least, largest)],  # type: ignore[arg-type]
            bounds=Bounds(0, most),  # type: ignore[arg-type]
            integrality=kinds,
            options={"mip_rel_gap": 0.0, "presolve": presolve},
        )
        if found.x is not None and (found.x[chosen] > 0.5).any():
            return tuple((found.x[chosen] > 0.5).tolist())
    return tuple((rows > 0).tolist())


def _traffic(peers: Sequence[AveragingPeer], computes: Sequence[bool]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Upload and download of each peer in turn: bytes with no share and for a whole share, of P, and the bandwidth."""
    others = len(peers) - 1
    total = sum(computes)
    rows = [
        one
        for peer, own in zip(peers, computes, strict=True)
        for one in ((own, others - own, peer.upload), (1, total - own - 1, peer.download))
    ]
    base, slope, bandwidth = np.asarray(rows, float).T
    return base, slope, bandwidth


def _least_last(peers: Sequence[AveragingPeer], matrix: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Shares and one more variable, which is least, so that the matrix times them is at most so much."""
    from scipy.optimize import linprog

    found = linprog(
        np.append(np.zeros(len(peers)), 1.0),
        A_ub=matrix,
        b_ub=most,
        A_eq=np.append(np.ones(len(peers)), 0.0)[None],
        b_eq=[1.0],
        bounds=[*((0.0, float(peer.reachable)) for peer in peers), (0.0, None)],
    )
    assert found.x is not None  # shares of reachable peers are feasible
    return found.x


def _check_peers(peers: Sequence[AveragingPeer]) -> None:
    if not any(peer.reachable for peer in peers):
        raise ValueError(
            f"averaging: none of {len(peers)} peers can be reached; one that others can reach must average."
        )


def _check_size(size: float) -> None:
    if not 0 < size < math.inf:
        raise ValueError(f"averaging: size = {size}; give bytes of the gradients, above 0.")


def _computes(peers: Sequence[AveragingPeer], computes: Sequence[bool] | None) -> tuple[bool, ...]:
    """Peers that compute, by default all that can."""
    _check_peers(peers)
    chosen = tuple(peer.rows > 0 for peer in peers) if computes is None else tuple(computes)
    if len(chosen) != len(peers) or not any(chosen):
        raise ValueError(
            f"averaging: computes = {list(chosen)}; say of each of {len(peers)} peers, and one must compute."
        )
    return chosen
