"""What a run of the whole suite leaves out of its matrices."""

from __future__ import annotations

from tests import drawn_cases

CASES = {"matrix": [f"matrix[{n}]" for n in range(5)], "alone": ["alone"]}
SHARES = {"matrix": 0.4, "alone": 0.5}


def test_the_share_of_a_matrix_runs_and_seeds_reach_every_case() -> None:
    ran: set[str] = set()
    times = 0
    for seed in range(200):
        left = drawn_cases.left_out(CASES, SHARES, seed)
        assert left == drawn_cases.left_out(CASES, SHARES, seed)
        assert len(left & set(CASES["matrix"])) == 3
        ran |= {case for cases in CASES.values() for case in cases} - left
        times += "alone" not in left
    assert ran == {*CASES["matrix"], "alone"}
    assert 60 < times < 140


def test_shares_are_met_on_average() -> None:
    """0.4 of three cases is one case in four runs of five, and two in the fifth."""
    ran = [3 - len(drawn_cases.left_out({"few": ["a", "b", "c"]}, {"few": 0.4}, seed)) for seed in range(500)]
    assert set(ran) == {1, 2}
    assert 1.1 < sum(ran) / len(ran) < 1.3


def test_a_small_share_of_few_cases_may_be_none() -> None:
    left = [len(drawn_cases.left_out({"few": ["a", "b"]}, {"few": 0.1}, seed)) for seed in range(200)]
    assert set(left) == {1, 2}
    assert 20 < left.count(1) < 60
