"""Words: every public symbol has a docstring that begins with the field's term, and the glossary leads to the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.source_tree import ROOT, parse, sources

CODE = ("jaxllm", "pallas_kernels", "sharding", "recipes", "benchmarks")
RIDDLES = ("Of", "What", "Who", "Whose", "Whom", "As", "And", "Where", "How", "Which", "That")
"""First words of docstrings that describe a thing without naming it."""

GLOSSARY = ROOT / "docs" / "glossary.md"
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documented(path: Path) -> Iterator[tuple[str, Documented, bool]]:
    """(where, node, public) of a file's module, classes, functions and methods."""
    yield f"{path.relative_to(ROOT)}:1", parse(path), True

    def walk(node: ast.AST, public: bool) -> Iterator[tuple[str, Documented, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                shown = public and not child.name.startswith("_")
                yield f"{path.relative_to(ROOT)}:{child.lineno}: {child.name}", child, shown and not repeated(child)
                # What is defined inside a function is not public.
                yield from walk(child, shown and isinstance(child, ast.ClassDef))
            elif isinstance(child, (ast.If, ast.Try, ast.With)):
                yield from walk(child, public)

    yield from walk(parse(path), True)


def repeated(node: Documented) -> bool:
    """Whether a definition is another form of one that is documented: an overload, or a property's setter."""
    marks = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
    return any(mark.endswith(("overload", ".setter", "override", ".defjvp", ".defvjp")) for mark in marks)


@pytest.mark.parametrize("top", CODE)
def test_docstrings_begin_with_the_name_of_the_thing(top):
    problems = []
    for path in sources(top):
        for where, node, _ in documented(path):
            text = ast.get_docstring(node) or ""
            if text and text.split()[0] in RIDDLES:
                problems.append(f"{where}: {text.splitlines()[0]}")
    assert not problems, f"{len(problems)} docstrings begin with one of {RIDDLES}:\n" + "\n".join(problems)


@pytest.mark.parametrize("top", CODE)
def test_every_public_symbol_has_a_docstring(top):
    problems = [
        where for path in sources(top) for where, node, public in documented(path)
        if public and not (ast.get_docstring(node) or "").strip()
    ]  # fmt: skip
    assert not problems, f"{len(problems)} public symbols without a docstring:\n" + "\n".join(problems)


def glossary() -> list[tuple[str, str]]:
    """(term, file) of each row of the glossary's table."""
    rows = re.findall(r"^\| (.+?) \| .+? \| `([^`]+)`.*\|$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    return [(term, file) for term, file in rows if term not in ("term", "---")]


def test_the_glossary_has_the_terms_of_the_field():
    terms = [term for term, _ in glossary()]
    assert len(terms) >= 60
    assert terms == sorted(terms, key=str.lower), "rows are in alphabetical order"
    assert len(set(terms)) == len(terms)


def test_each_term_is_found_in_the_module_that_implements_it():
    """By a search that ignores case, as a newcomer would search; hyphens and line breaks count as spaces."""
    problems = []
    for term, file in glossary():
        path = ROOT / file
        if not path.is_file():
            problems.append(f"{term}: there is no file {file}")
            continue
        text = re.sub(r"[\s\-]+(# )?", " ", path.read_text(encoding="utf-8")).lower()
        names = re.sub(r"\s*\(.*?\)", "", term).lower().replace("-", " ")
        if names not in text:
            problems.append(f"{term}: not a word of {file}")
    assert not problems, "\n" + "\n".join(problems)
