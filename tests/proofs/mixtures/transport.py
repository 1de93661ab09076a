"""Optimal transport: Sinkhorn's algorithm against POT, and the distance's gradient in the shares."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ot
from hypothesis import strategies as st

from jaxllm.data.selection.optimal_transport import MixtureDistance, sinkhorn, transport_cost, transport_plan
from tests.proofs.harness import proof


@proof(
    "mixtures",
    count=200,
    sample=5,
    strategy=st.fixed_dictionaries(
        {
            "rows": st.sampled_from([1, 2, 5, 16, 33]),
            "columns": st.sampled_from([1, 3, 8, 21]),
            "epsilon": st.sampled_from([0.02, 0.05, 0.2, 1.0, 5.0]),
            "cost": st.sampled_from(["uniform", "distances", "ties"]),
            "zeros": st.booleans(),
            "seed": st.integers(0, 1 << 32),
        }
    ),
    bound={"plan": 1e-8, "cost": 1e-8, "marginals": 1e-10},
    float64=True,
)
def sinkhorn_is_that_of_pot(example: dict[str, Any]) -> dict[str, float]:
    """Plan, transport cost and least value equal those of POT; the plan has the given marginals, also zeros."""
    rng = np.random.default_rng(example["seed"])
    rows, columns, epsilon = example["rows"], example["columns"], example["epsilon"]
    a, b = rng.dirichlet(np.ones(rows)), rng.dirichlet(np.ones(columns))
    if example["cost"] == "distances":
        cost = ((rng.normal(size=(rows, 1, 3)) - rng.normal(size=(columns, 3))) ** 2).sum(axis=-1) / 6
    else:
        cost = rng.random((rows, columns)) if example["cost"] == "uniform" else rng.integers(0, 3, (rows, columns)) / 2
    if example["zeros"] and rows > 1:
        a[rng.integers(rows)] = 0
        a /= a.sum()
    found = sinkhorn(a, b, cost, epsilon, tolerance=1e-12, max_iterations=200_000)
    plan = np.asarray(transport_plan(a, b, cost, epsilon, found))
    kept = a > 0  # POT takes the logarithm of the weights
    expected = np.zeros_like(plan)
    expected[kept] = ot.sinkhorn(
        a[kept], b, cost[kept], epsilon, method="sinkhorn_log", numItermax=200_000, stopThr=1e-13, warn=False
    )
    weights = (a[:, None] * b)[kept]
    inside = expected[kept]
    divergence = np.sum(np.where(inside > 0, inside * np.log(np.maximum(inside, 1e-300) / weights), 0))
    least = (inside * cost[kept]).sum() + epsilon * divergence
    return {
        "plan": np.abs(plan - expected).max(),
        "cost": abs(float(transport_cost(jnp.array(a), jnp.array(b), jnp.array(cost), epsilon)) - least),
        "marginals": max(np.abs(plan.sum(axis=1) - a).max(), np.abs(plan.sum(axis=0) - b).max()),
    }


@proof("mixtures", count=60, sample=3, bound={"slope": 1e-6, "to_itself": 1e-7}, float64=True)
def distance_has_the_slope_of_its_gradient(seed: int) -> dict[str, float]:
    """Along drawn directions of the simplex, also from its boundary; zero from a mixture to itself.

    Errors of slopes are relative to the largest slope; central differences of 1e-4 have some 1e-8. Between clouds that
    are far apart for their regularisation the iterations end at ``MAX_ITERATIONS``, a few 1e-9 from the least cost.
    """
    rng = np.random.default_rng(seed)
    sources = int(rng.integers(2, 6))
    clouds = [rng.normal(size=(16, 4)) * rng.uniform(0.3, 1) + rng.normal(size=4) for _ in range(sources)]
    regularisation = float(rng.choice([0.1, 0.2, 0.5]))
    distance = MixtureDistance(clouds, rng.normal(size=(24, 4)), regularisation)
    shares = rng.dirichlet(np.ones(sources))
    if rng.random() < 0.3 and sources > 2:
        shares[0] = 0
        shares /= shares.sum()
    direction = np.where(shares > 0, rng.normal(size=sources), 0)
    direction -= np.where(shares > 0, direction.sum() / (shares > 0).sum(), 0)
    step = 1e-4 * min(1.0, shares[shares > 0].min()) * direction / np.abs(direction).max()
    _, gradient = jax.value_and_grad(distance)(jnp.array(shares))
    slope = float(distance(jnp.array(shares + step)) - distance(jnp.array(shares - step))) / 2
    scale = float(jnp.abs(gradient - gradient.mean()).max() * np.abs(step).max())
    same = MixtureDistance(clouds, np.concatenate(clouds), regularisation)
    return {
        "slope": abs(slope - float(gradient @ step)) / scale,
        "to_itself": abs(float(same(jnp.full(sources, 1 / sources)))),
    }
