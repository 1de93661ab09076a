"""Plans of large models on one device: programs of streamed layers, compiled for it, need what the plan says."""

from __future__ import annotations

import itertools

from benchmarks.serving.streamed_plans import MODELS, MODES, ON, plan_on
from tests.proofs.harness import proof


@proof(
    "offload",
    cases=list(itertools.product(MODELS, ON, MODES)),
    sample=1,
    bound={"over the limit": 0.0, "beyond the plan": 0.06},
    counts=("tokens_per_second", "host"),
)
def streamed_plans_compile(case: tuple[str, str, str]) -> dict[str, float]:
    """Llama 3 70B and Mixtral 8x22B in int4 on one H100 and one chip of TPU v6e, many sequences of 2,048 tokens or one:
    the solved placement's programs, with what stays and the window, over 90% of device memory, and over the bytes of
    the plan, which leaves room for what programs need besides: of prompts of 512 rows, on a chip of 31 GiB, up to 5.3%.
    A step takes no longer than copies and computing one after the other, and no less than either. Of one
    sequence the mixture has experts in slots: of whole layers all experts are copied, where a token wants two.
    """
    plan = plan_on(case[1], case[0], case[2])
    assert max(plan["copies"], plan["computing"]) <= plan["seconds"] * (1 + 1e-6)
    if case[2] == "latency" and case[0].startswith("mixtral"):
        assert plan["slots"] > 0
    assert plan["seconds"] <= (plan["copies"] + plan["computing"]) * (1 + 1e-6)
    return {
        "over the limit": max(0.0, plan["compiled"] / plan["limit"] - 1),
        "beyond the plan": abs(plan["compiled"] / plan["planned"] - 1),
        "tokens_per_second": plan["tokens_per_second"],
        "host": float(plan["host"]),
    }
