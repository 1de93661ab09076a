"""Mutants are written rightly: each text occurs once in its file, and its tests exist. They run by `make proof`."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests import environment
from tests.mutants import mutant
from tests.mutants.mutant import Mutant, MutantError

ROWS = [(room, one) for room, found in mutant.rooms().items() for one in found]
MOST_EQUIVALENT = 5


def test_names_are_unique():
    assert not [name for name, count in Counter((room, one.name) for room, one in ROWS).items() if count > 1]


def test_every_text_occurs_once():
    problems = []
    for room, one in ROWS:
        try:
            changed = one.apply((environment.ROOT / one.file).read_text(encoding="utf-8"))
            if one.file.endswith(".py"):
                ast.parse(changed)
        except (MutantError, OSError, SyntaxError) as error:
            problems.append(f"{room}/{one.name}: {error}")
    assert not problems, "\n" + "\n".join(problems)


def test_every_test_exists():
    """Node ids name a file and, after it, a test function of it; arguments in brackets are pytest's to find."""
    functions: dict[str, set[str]] = {}
    problems = []
    for room, one in ROWS:
        assert one.tests, one.name
        for test in one.tests:
            file, _, name = test.partition("[")[0].partition("::")
            if file not in functions:
                text = (environment.ROOT / file).read_text(encoding="utf-8")
                functions[file] = {n.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)}
            if name and name not in functions[file]:
                problems.append(f"{room}/{one.name}: {test}")
    assert not problems, "\n" + "\n".join(problems)


def test_few_are_equivalent():
    assert len([one for _, one in ROWS if one.equivalent]) <= MOST_EQUIVALENT


def test_wrong_rows_are_refused():
    row = Mutant("m", "a.py", "x", "y", ("t",))
    assert row.apply("ax") == "ay"
    for text in ("a", "xx"):
        with pytest.raises(MutantError, match="it must occur once"):
            row.apply(text)


def test_the_runner(tmp_path, monkeypatch):
    """In a made-up repository: a fault that its test sees, one that it cannot see, and one that does not even run."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--sample-minutes')\n")
    (tmp_path / "it.py").write_text(sound := "def add(a, b):\n    return a + b\n")
    (tmp_path / "test_it.py").write_text("from it import add\n\ndef test_sum():\n    assert add(1, 2) == 3\n")
    monkeypatch.setattr(mutant, "_copy", lambda: tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # starts in a tenth of the time
    mutant._check_sound.cache_clear()
    tests = ("test_it.py::test_sum",)
    faults = [Mutant("m", "it.py", "return a + b", f"return {new}", tests) for new in ("a - b", "b + a", "a +* b")]
    assert mutant.survives(faults[0]) == []
    assert mutant.survives(faults[1]) == list(tests)
    with pytest.raises(MutantError, match="gives no verdict"):
        mutant.survives(faults[2])
    assert (tmp_path / "it.py").read_text() == sound
    mutant._check_sound.cache_clear()
