"""Notebooks are what their sources say, in the format that Colab opens. The proof ``notebooks`` runs them."""

from __future__ import annotations

import ast
import json

import pytest

from notebooks.build import FOLDER, NAMES, cells, notebook


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_its_source(name):
    """`python -m notebooks.build` makes them anew."""
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
