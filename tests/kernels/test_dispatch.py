"""Kernel dispatch: an implementation is chosen, refused or named, never replaced silently."""

from __future__ import annotations

import pytest

from pallas_kernels._dispatch import dispatch


def fast(x):
    if x % 8:
        raise NotImplementedError(f"x = {x} is not a multiple of 8")
    return "fast"


def small(x):
    if x > 100:
        raise NotImplementedError(f"x = {x} is more than 100")
    return "small"


def broken(x):
    raise RuntimeError("a bug")


IMPLEMENTATIONS = {"fast": fast, "small": small, "broken": broken}


@pytest.mark.parametrize(
    ("choice", "x", "want"),
    [
        (None, 8, "fast"),
        (None, 7, "small"),
        ("fast", 8, "fast"),
        ("small", 8, "small"),
        (("small", "fast"), 8, "small"),
        (["small", "fast"], 800, "fast"),
    ],
)
def test_first_that_supports_the_arguments(choice, x, want):
    assert dispatch("op", IMPLEMENTATIONS, choice, x) == want


def test_a_named_one_does_not_fall_back():
    with pytest.raises(NotImplementedError, match=r"^x = 7 is not a multiple of 8$"):
        dispatch("op", IMPLEMENTATIONS, "fast", 7)


def test_all_reasons_are_given():
    with pytest.raises(NotImplementedError, match=r"(?s)^op: .*fast: x = 701 is not.*small: x = 701 is more"):
        dispatch("op", IMPLEMENTATIONS, ("fast", "small"), 701)


def test_a_bug_is_not_a_refusal():
    with pytest.raises(RuntimeError, match="a bug"):
        dispatch("op", IMPLEMENTATIONS, ("broken", "small"), 1)


@pytest.mark.parametrize("choice", ["fats", ("small", "fats")])
def test_unknown_names_are_named_before_anything_runs(choice):
    with pytest.raises(ValueError, match=r"'fats'.*\['broken', 'fast', 'small'\]"):
        dispatch("op", IMPLEMENTATIONS, choice, 8)


def test_no_names_at_all():
    with pytest.raises(ValueError, match="empty"):
        dispatch("op", IMPLEMENTATIONS, (), 8)
