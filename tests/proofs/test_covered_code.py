"""Code that a proof covers, and the state of its record."""

from __future__ import annotations

import hashlib
import re

import pytest

from tests import environment
from tests.proofs import covered_code, harness, status, stored
from tests.proofs.covered_code import Tree

FILES = {
    "jaxllm/__init__.py": "",
    "jaxllm/room/__init__.py": """
from typing import TYPE_CHECKING
from jaxllm.room.eager import Eager as Eager
if TYPE_CHECKING:
    from jaxllm.room.lazy import Lazy
_HOMES = {"lazy": ("Lazy", "other_name"), "apart": ("Apart",)}
def defined_here(): ...
""",
    "jaxllm/room/eager.py": "class Eager: ...",
    "jaxllm/room/lazy.py": "import jaxllm.deep\nclass Lazy: ...",
    "jaxllm/room/apart.py": "class Apart: ...",
    "jaxllm/deep.py": "DEEP = 1",
    "jaxllm/alone.py": "",
    "jaxllm/main.py": "",
    "recipes/data.json": "{}",
    "tests/helpers/shared.py": "def run():\n    from jaxllm import alone\n",
    "tests/proofs/harness.py": "import jaxllm.main",
    "tests/proofs/a/trial.py": "",
}


def tree(trial: str = "", **changed: str) -> Tree:
    files = (
        FILES | {"tests/proofs/a/trial.py": trial} | {name.replace("__", "/") + ".py": s for name, s in changed.items()}
    )

    def read(name):
        return hashlib.sha1(files[name].encode()).hexdigest(), lambda: files[name].encode()

    return Tree(files, read)


@pytest.mark.parametrize(
    ("trial", "covered"),
    [
        ("import numpy", set()),
        ("from jaxllm.room import Eager", {"jaxllm/room/eager.py"}),
        ("from jaxllm.room import Lazy", {"jaxllm/room/lazy.py", "jaxllm/deep.py"}),
        ("def f():\n    from jaxllm.room import other_name", {"jaxllm/room/lazy.py", "jaxllm/deep.py"}),
        ("from jaxllm import room\nroom.Apart()", {"jaxllm/room/apart.py"}),
        ("import jaxllm.room as r\nr.Apart()", {"jaxllm/room/apart.py"}),
        ("import jaxllm.room\njaxllm.room.Eager.x", {"jaxllm/room/eager.py"}),
        ("from jaxllm.room import eager", {"jaxllm/room/eager.py"}),
        ("from jaxllm.room import defined_here", {"jaxllm/room/__init__.py", "jaxllm/room/eager.py"}),
        ("from tests.helpers import shared", {"tests/helpers/shared.py", "jaxllm/alone.py"}),
        ("import jaxllm.alone", {"jaxllm/alone.py"}),
        ("from tests.proofs.harness import proof", set()),
        ("run(['-m', 'jaxllm.main', 'jaxllm.gone'])", {"jaxllm/main.py"}),
        ("CODE = '''\nfrom jaxllm.room import Eager, Apart\n'''", {"jaxllm/room/eager.py", "jaxllm/room/apart.py"}),
        ("ALSO_COVERS = ('recipes/*.json',)", {"recipes/data.json"}),
        ("'''Beside jaxllm.main.'''\n'jaxllm.main'", set()),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jaxllm.alone", set()),
    ],
)
def test_imports_lead_to_the_modules_that_define_what_is_named(trial, covered):
    assert tree(trial).covered("tests.proofs.a.trial") - {"tests/proofs/a/trial.py"} == covered


def test_a_package_that_is_a_value_leads_to_all_its_modules():
    covered = tree("from jaxllm import room\nlook(room)").covered("tests.proofs.a.trial")
    assert {f"jaxllm/room/{name}.py" for name in ("__init__", "eager", "lazy", "apart")} <= covered
    assert "jaxllm/main.py" not in covered


def test_the_digest_is_of_what_the_code_says():
    """Not of its words about itself, and not of code that is not reached."""
    trial = "from jaxllm.deep import DEEP\nassert DEEP == 1"

    def digest(text=trial, **changed):
        return tree(text, **changed).covers("tests.proofs.a.trial")

    assert digest() == digest(
        '"""Says what it is."""\nfrom jaxllm.deep import (\n    DEEP,\n)  # why\nassert DEEP == 1'
    )
    assert digest() == digest(jaxllm__deep='DEEP = 1\n"""How deep."""')
    assert digest() == digest(jaxllm__alone="changed = True")
    others = {
        digest("from jaxllm.deep import DEEP\nassert DEEP == 2"),
        digest(jaxllm__deep="DEEP = 2"),
        digest(jaxllm__deep="DEEP: int = 1"),
        digest("from jaxllm.alone import DEEP\nassert DEEP == 1"),
    }
    assert len(others | {digest()}) == 5


def test_every_proof_covers_code_of_ours():
    here = Tree.here()
    for issue in harness.issues():
        for proof in harness.load(issue).values():
            covered = here.covered(proof.module)
            assert any(name.split("/")[0] in (*environment.CHECKED, "notebooks") for name in covered), proof.name
            assert proof.module.replace(".", "/") + ".py" in covered or "functools" not in proof.module
    covered_code.keep()


def test_the_past_is_read_from_git():
    if not environment.git("rev-parse", "HEAD"):
        pytest.skip("no git")
    then = Tree.at("HEAD")
    assert len(then.covered("tests.proofs.first_run.parity")) > 50
    with pytest.raises(LookupError, match="no commit"):
        Tree.at("0" * 40)


RECORD = {"commit": "c" * 40, "dirty": False, "covers": "d" * 16, "finished": "2026-01-02T03:04:05", "run": 6}


def test_states(monkeypatch):
    proof = harness.Proof("toy", "case", lambda _: None, 6, 2, {}, None, 4, False, True)
    here = tree()
    made = RECORD | {"covers": here.covers(proof.module)}
    assert status.state(None, proof, here) == "not stored"
    assert status.state(made, proof, here) == "current"
    assert status.state(made | {"dirty": True}, proof, here) == "stale: made of code that was not committed"
    assert "not in this repository's history" in status.state(RECORD, proof, here)

    def of(text: str) -> Tree:
        return tree("from jaxllm.deep import DEEP", jaxllm__deep=text)

    # The record's commit, one that changes other files, one that changes words, one that changes code.
    trees = {
        "c" * 40: of("DEEP = 1"),
        "1" * 40: of("DEEP = 1"),
        "2" * 40: of("DEEP = 1 # it is"),
        "3" * 40: of("DEEP = 2"),
    }
    files = [{"x"}, {"jaxllm/alone.py"}, {"jaxllm/deep.py"}, {"jaxllm/deep.py"}]
    monkeypatch.setattr(status, "_tree", trees.__getitem__)
    monkeypatch.setattr(status, "_history", lambda: dict(zip(trees, map(frozenset, files), strict=True)))
    monkeypatch.setattr(harness.Proof, "module", "tests.proofs.a.trial")
    made = RECORD | {"covers": trees["c" * 40].covers(proof.module)}
    assert status.state(made, proof, trees["2" * 40]) == "current"
    assert status.state(made, proof, of("DEEP = 2")) == "stale since 33333333"
    trees["3" * 40] = of("DEEP = 1")
    assert status.state(made, proof, of("DEEP = 2")) == "stale: changed, but not committed"


def test_a_commit_of_a_branch_counts_from_its_merge():
    merges = environment.git("rev-list", "--merges", "--first-parent", "-1", "HEAD")
    branch = environment.git("rev-parse", f"{merges}^2") if merges else ""
    if not branch:
        pytest.skip("no merge in this clone")
    history = list(status._history())
    assert history[status._since(branch, history)] == merges or branch in history
    assert history[status._since(history[-2], history)] == history[-1]
    with pytest.raises(LookupError):
        status._since("0" * 40, history)


ROW = (
    r"\| `\w+` \| (\d{4}-\d\d-\d\d `[0-9a-f]{8}`)? \| \d* \| "
    r"(current|not stored|stale since [0-9a-f]{8}|stale: [^|]+) \|"
)


def test_the_page_is_what_the_command_writes():
    """Its form; not whether its records are current, which is no failure."""
    text = (stored.FOLDER.parent / "proof_status.md").read_text()
    toy = status.page({"toy": {"case": (RECORD, "current"), "other": (None, "not stored")}})
    for page in (text, toy):
        assert page.startswith(status.HEADER)
        rows = [line for line in page.removeprefix(status.HEADER).splitlines() if line.startswith("| `")]
        assert all(re.fullmatch(ROW, row) for row in rows)
        assert f"{sum(' | current |' in row for row in rows)} of {len(rows)} are current.\n" in page
    assert toy.count("| `") == 2
