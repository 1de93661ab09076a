"""Source tree of the repository as the contract tests read it: files, modules, imports between files."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import environment

ROOT = environment.ROOT


@functools.cache
def tracked() -> list[Path]:
    """Files of the repository: those git knows, and new ones it does not ignore."""
    names = environment.git("ls-files", "-co", "--exclude-standard").splitlines()
    if not names:
        pytest.skip("not a git checkout")
    return [path for name in names if (path := ROOT / name).is_file()]


def sources(*tops: str) -> list[Path]:
    """Python files below some top-level folders."""
    return [p for p in tracked() if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in tops]


def module_name(path: Path) -> str:
    """Dotted module name of a file; a package's ``__init__.py`` has the package's name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def parse(path: Path) -> ast.Module:
    """Syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def exported(path: Path) -> dict[str, str]:
    """Name -> module that defines it, for the names which a package's ``__init__.py`` imports from elsewhere."""
    return {
        alias.asname or alias.name: node.module
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }


def file_imports(tops: tuple[str, ...]) -> dict[str, set[str]]:
    """Module -> the modules it imports, by file; imports inside functions count, type-checking ones too.

    A name that is imported from a package leads to the module which defines it, so a package is no meeting point of
    all its files.
    """
    files = {module_name(p): p for p in sources(*tops)}
    packages = {name for name, p in files.items() if p.name == "__init__.py"}

    def home(module: str, name: str) -> str:
        if f"{module}.{name}" in files:
            return f"{module}.{name}"
        if module in packages:
            target = exported(files[module]).get(name)
            if target is not None and target != module:
                return home(target, name)
        return module

    def targets(path: Path) -> Iterator[str]:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                yield from (home(node.module, alias.name) for alias in node.names)

    return {
        name: {target for target in targets(path) if target in files and target not in packages and target != name}
        for name, path in files.items()
        if name not in packages
    }


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = []
            while (top := stack.pop()) != node:
                component.append(top)
            if component:
                found.append(sorted([*component, node]))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found
