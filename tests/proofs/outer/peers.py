"""Peers that come and go fill fixed global batches: synchronous SGD on the rows that they added."""

from __future__ import annotations

from hypothesis import strategies as st

from jaxllm.train.outer.dedloc import PeersConfig
from tests.proofs.harness import proof
from tests.train.test_dedloc import synchronous_error


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, str, PeersConfig]:
    """Seed of the absences, mesh and peers."""
    mesh = draw(st.sampled_from(["data=4", "data=8", "data=2,fsdp=2", "data=4,tensor=2", "data=2,local=2"]))
    away, steps = draw(st.sampled_from([0.0, 0.25, 0.5, 0.9])), draw(st.integers(1, 4))
    return draw(st.integers(0, 2**31)), mesh, PeersConfig(draw(st.integers(1, 14)), away, steps)


@proof("outer", count=60, sample=1, strategy=histories(), float64=True, bound=1e-10)
def peers_are_synchronous(case: tuple[int, str, PeersConfig]) -> float:
    """Parameters after rounds of random absences, less those of one device on batches of the rows added."""
    seed, mesh, peers = case
    return synchronous_error(mesh, peers, 30 if peers.away > 0.5 else 12, seed)
