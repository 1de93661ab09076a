"""Notebooks equal their sources, in the format that Colab opens. The proof ``notebooks`` runs them."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess

import pytest

from notebooks.build import FOLDER, NAMES, cells, notebook


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_its_source(name):
    """`python -m notebooks.build` writes them."""
    assert (FOLDER / f"{name}.ipynb").read_text() == notebook(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_opens_with_what_the_reader_will_have(name):
    (kind, opening), (second, setup), *rest = cells((FOLDER / f"{name}.py").read_text())
    assert (kind, second) == ("markdown", "code")
    assert "**At the end you have**" in opening.splitlines()[1]
    assert setup.startswith("# Installs jaxllm")
    assert any(kind == "code" and "plt." in text for kind, text in rest)
    for kind, text in [(second, setup), *rest]:
        if kind == "code":
            ast.parse(text)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_holds_no_outputs(name):
    """By the format's rules: ids of cells are unique, and only code has outputs."""
    made = json.loads((FOLDER / f"{name}.ipynb").read_text())
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in made["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in made["cells"]:
        assert ("outputs" in cell) == (cell["cell_type"] == "code")
        assert not cell.get("outputs")


def test_every_notebook_is_there():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)
    assert len(NAMES) == 6


def setup(patch: pytest.MonkeyPatch, repository: str = "") -> list[list[str]]:
    """Pip commands of the first cell where there is no jaxllm and no accelerator."""
    asked: list[list[str]] = []
    patch.setattr(importlib.util, "find_spec", lambda name: None)
    patch.setattr("shutil.which", lambda name: None)
    patch.setattr("pathlib.Path.glob", lambda *_: iter(()))
    patch.setattr(subprocess, "run", lambda command, **_: asked.append(command[1:]))
    _, (_, text), *_ = cells((FOLDER / "smollm2.py").read_text())
    assert text.count('REPOSITORY = ""') == 1
    exec(text.replace('REPOSITORY = ""', f"REPOSITORY = {repository!r}"), {})
    return asked


def test_the_first_cell_installs_the_clone_that_it_is_in(monkeypatch):
    """From the notebooks' own folder too, where Jupyter starts."""
    monkeypatch.chdir(FOLDER)
    ((*pip, what),) = setup(monkeypatch)
    assert pip == ["-m", "pip", "install", "--quiet"]
    assert what == f"jaxllm[hf] @ {FOLDER.parent.as_uri()}"


def test_elsewhere_the_first_cell_says_what_it_needs(monkeypatch, tmp_path):
    """Nobody's address is made up."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="Set REPOSITORY in this cell"):
        setup(monkeypatch)
    ((*_, what),) = setup(monkeypatch, "https://git.example/them/jaxllm")
    assert what == "jaxllm[hf] @ git+https://git.example/them/jaxllm"
