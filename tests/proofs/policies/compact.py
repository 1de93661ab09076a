"""Compressed activations: bytes that the TPU compiler saves, and the increase of the loss on real text."""

from __future__ import annotations

import dataclasses
import functools

from jaxllm.train.compile_step import compile_for
from tests.proofs.harness import proof
from tests.proofs.policies import offload
from tests.proofs.policies.reference import RUN, evaluated, trained

SEEDS = (0, 1, 2)
GAPS = {"compact:0.5": 0.05, "compact:0.25": 0.07, "compact:0.125": 0.09}
"""The most that the loss may be larger, of the mean over seeds, as a part of that with whole inputs."""


@functools.cache
def temporaries(remat: str) -> int:
    """Temporary bytes of a device, in the step of ``offload``'s model."""
    run = offload.run(remat, "adamw", offload.HostConfig())
    return compile_for(run, offload.ON).temp_bytes


@proof("policies", cases=[0.125, 0.25, 0.5], sample=1, bound=0.05)
def compact_bytes(share: float) -> float:
    """Difference from the formula: outputs of the two norms and the feed-forward layer's inner activations are freed.

    For them there are seven projections, of which the compiler may merge those of one input. Attention's output stays,
    for attention's own backward pass.
    """
    d, f = offload.WIDTH, 4 * offload.WIDTH
    numbers = 2 * d + f - share * (5 * d + d + f)
    want = 2 * numbers * offload.TOKENS * offload.LAYERS
    return max(0.0, 1 - (temporaries("none") - temporaries(f"compact:{share}")) / want)


@functools.cache
def losses(remat: str) -> tuple[float, ...]:
    """Held-out loss of each seed."""
    run = dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, remat=remat))
    return tuple(evaluated(run, trained(run, seed)[0].params) for seed in SEEDS)


@proof("policies", cases=tuple(GAPS), sample=1, bound={"of_limit": 1.0})
def compact_loss(remat: str) -> dict[str, float]:
    """Reference model with random projections of matmul inputs, against the same with the inputs themselves."""
    whole, own = (sum(losses(of)) / len(SEEDS) for of in ("none", remat))
    assert whole < 2.5, "the reference learns: bytes alone, by their frequencies, take 3.3"
    return {"of_limit": max(0.0, own / whole - 1) / GAPS[remat]}
