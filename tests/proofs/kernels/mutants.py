"""Mutants: each deliberate mistake in an implementation makes the test body of its operation fail.

A body is tests/kernels/OP_body.py with

    MUTATIONS       (implementation, mistake) -> (module of the package, its text, the text with the mistake)
    CASES           by name
    KILLERS         names of the cases that a mutant is tried on, until one fails
    check           (implementation, case, numpy Generator): raises AssertionError if values are wrong
    PACKAGE         optional: the operation's package; default: pallas_kernels.OP
    small_pieces    optional: a context in which small shapes cross many blocks
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import pkgutil
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from tests import environment
from tests.proofs.harness import ProofError, proof

ALSO_COVERS = ("tests/kernels/*_body.py", "pallas_kernels/*.py")

UNCHANGED = ("api", "config", "pages", "encoding")
"""Modules of a package whose functions and types the test bodies hold on to."""


def modules(package: str) -> list[types.ModuleType]:
    """Modules of a package, each after those that it imports at its top."""
    found = importlib.import_module(package)
    names = [m.name for m in pkgutil.iter_modules(found.__path__) if m.name not in UNCHANGED]
    loaded = {name: importlib.import_module(f"{package}.{name}") for name in names}
    uses = {name: _imported(inspect.getsource(module), package) & set(names) for name, module in loaded.items()}
    ordered: list[str] = []
    while len(ordered) < len(names):
        ordered += [name for name in names if name not in ordered and uses[name] <= set(ordered)]
    return [loaded[name] for name in ordered]


def _imported(source: str, package: str) -> set[str]:
    """Names of the package's modules that a module imports when it is loaded."""
    found: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.module == package:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{package}."):
            found.add(node.module.removeprefix(f"{package}."))
    return found


@contextlib.contextmanager
def mutated(package: str, module: str, text: str, mistake: str) -> Iterator[None]:
    """The package's implementations made of other source text, as new functions that nothing has compiled before.

    Raises:
        ProofError: the module does not hold the text.
    """
    home = importlib.import_module(package)
    implementations = importlib.import_module(f"{package}.api").IMPLEMENTATIONS
    originals = modules(package)
    if module not in [original.__name__.rpartition(".")[2] for original in originals]:
        raise ProofError(f"{package} has no module {module!r} that can be changed.")
    with pytest.MonkeyPatch.context() as patch:
        copies: dict[str, types.ModuleType] = {}
        for original in originals:
            name = original.__name__.rpartition(".")[2]
            source = inspect.getsource(original)
            if name == module:
                if text not in source:
                    raise ProofError(f"{original.__file__} no longer holds {text!r}: renew the mutation.")
                source = source.replace(text, mistake)
            copy = types.ModuleType(original.__name__)
            copy.__file__, copy.__package__ = original.__file__, package
            exec(compile(source, f"{name} with a mistake", "exec"), vars(copy))
            patch.setitem(sys.modules, copy.__name__, copy)
            # Where __init__ exports a function of the module's own name, the name stays the function's.
            if getattr(home, name, None) is original:
                patch.setattr(home, name, copy)
            copies[copy.__name__] = copy
        for name, function in implementations.items():  # others import their module when they are called
            if copy := copies.get(function.__module__):
                patch.setitem(implementations, name, getattr(copy, function.__name__))
        yield


def bodies() -> dict[str, Any]:
    """The test bodies that have mutations, by operation."""
    files = sorted((environment.ROOT / "tests" / "kernels").glob("*_body.py"))
    loaded = {f.stem.removesuffix("_body"): importlib.import_module(f"tests.kernels.{f.stem}") for f in files}
    return {name: body for name, body in loaded.items() if hasattr(body, "MUTATIONS")}


def survives(body: Any, implementation: str, package: str, edit: tuple[str, str, str]) -> bool:
    """Whether no case sees the mistake."""
    small = getattr(body, "small_pieces", contextlib.nullcontext)
    with mutated(package, *edit), small():
        for case in body.KILLERS:
            try:
                body.check(implementation, body.CASES[case], np.random.default_rng(0))
            except AssertionError:
                return False
    return True


def _register(name: str, body: Any) -> None:
    package = getattr(body, "PACKAGE", f"pallas_kernels.{name}")

    def mutants_fail(mutant: tuple[str, str]) -> None:
        """A mistake that the cases do not see is a failure."""
        jax.clear_caches()  # a body may keep programs that were compiled without the mistake
        assert not survives(body, mutant[0], package, body.MUTATIONS[mutant]), f"{mutant} survives {body.KILLERS}"

    proof("kernels", name=f"{name}_mutants_fail", cases=sorted(body.MUTATIONS), sample=1)(mutants_fail)


for _name, _body in bodies().items():
    _register(_name, _body)
