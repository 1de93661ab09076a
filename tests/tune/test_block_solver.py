"""Integer constraint solver of block sizes, beside brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxllm.tune.block_solver import BlockProblem, SumLimit
from jaxllm.tune.kernel_tuning import CASES


def brute_force(problem: BlockProblem) -> set[tuple[int, ...]]:
    """Every assignment, tried."""
    names = list(problem.domains)
    tried = itertools.product(*(sorted(set(problem.domains[name])) for name in names))
    return {values for values in tried if problem.satisfied(dict(zip(names, values, strict=True)))}


def random_problem(rng: np.random.Generator) -> BlockProblem:
    """One to four variables with repeated candidates, up to three limits of sums of products, up to three divisions."""
    names = ["a", "b", "c", "d"][: rng.integers(1, 5)]
    some = lambda: tuple(str(n) for n in rng.choice(names, rng.integers(0, len(names) + 1), replace=False))  # noqa: E731
    domains = {name: tuple(int(n) for n in rng.integers(1, 40, rng.integers(1, 9))) for name in names}
    limits = tuple(
        SumLimit(
            tuple((float(rng.integers(0, 9)), some()) for _ in range(rng.integers(1, 4))),
            float(10 ** rng.uniform(0, 4)),
            "x",
        )
        for _ in range(rng.integers(0, 4))
    )
    of = lambda: str(rng.choice(names)) if rng.random() < 0.5 else int(rng.integers(1, 60))  # noqa: E731
    return BlockProblem(domains, limits, tuple((str(rng.choice(names)), of()) for _ in range(rng.integers(0, 4))))


def check(problem: BlockProblem) -> int:
    """Holds that the solutions are those of brute force, each once; returns their number."""
    found = [tuple(one.values()) for one in problem.solutions()]
    assert len(set(found)) == len(found)
    assert set(found) == brute_force(problem)
    return len(found)


def test_solutions_are_those_of_brute_force(rng):
    counts = [check(random_problem(rng)) for _ in range(60)]
    assert min(counts) == 0 < max(counts)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_the_kernels_problems_have_solutions(platform):
    kind = {"tpu": "TPU v5 lite", "gpu": "NVIDIA H100 80GB HBM3"}[platform]
    for cases in CASES.values():
        for case in cases(platform, kind):
            for part in case.parts:
                legal = check(part.problem)
                every = np.prod([len(domain) for domain in part.problem.domains.values()])
                assert 4 <= legal < every, "the limits leave some out"


def test_wrong_problems_are_refused_and_empty_ones_say_why():
    with pytest.raises(ValueError, match="a: the candidates are"):
        BlockProblem({"a": (0, 4)})
    with pytest.raises(ValueError, match="a constraint names b; the variables are a"):
        BlockProblem({"a": (4,)}, divides=(("a", "b"),))
    with pytest.raises(ValueError, match="VMEM: a coefficient is negative"):
        SumLimit(((-1.0, ("a",)),), 4, "VMEM")
    empty = BlockProblem({"a": (8, 16)}, (SumLimit(((4.0, ("a",)),), 16, "bytes of VMEM"),))
    assert not list(empty.solutions())
    assert empty.why_empty() == "bytes of VMEM: the smallest sizes need 32, and 16 are there"
