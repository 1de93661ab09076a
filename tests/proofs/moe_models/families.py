"""Random models of every mixture-of-experts family, as ``real_models`` has them for dense ones."""

from __future__ import annotations

from tests.hub import peers
from tests.proofs.harness import proof
from tests.proofs.real_models import families

CASES = [(family, seed) for family in peers.MIXTURES for seed in range(30)]


@proof(
    "moe_models",
    cases=CASES,
    sample=2,
    bound={"forward": 1e-9, "decode": 1e-9, "packed": 1e-9, "gradient": 1e-9},
    float64=True,
)
def float64(case: tuple[str, int]) -> dict[str, float]:
    """Full forward, prefill and cached decode, packing with padding, gradients of the loss by leaf."""
    return families.equal_in_float64(*case)


@proof("moe_models", cases=CASES, sample=2, bound={"forward": 1e-5, "decode": 1e-5})
def float32(case: tuple[str, int]) -> dict[str, float]:
    """The logits as people compute them; every token's experts and the likeliest token equal."""
    return families.equal_in_float32(*case)


@proof("moe_models", cases=CASES, sample=2)
def round_trip(case: tuple[str, int]) -> None:
    """In and out, on one device or split over several: the same bytes and fields, and transformers reads them."""
    families.round_trip(*case)
