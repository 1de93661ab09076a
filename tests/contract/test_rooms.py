"""Folders and names: no import circle between files, no crowded folder, names unique in the whole tree."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict

from tests.contract.source_tree import ROOT, circles, file_imports, module_name, parse, sources

CODE = ("jaxllm", "pallas_kernels", "sharding", "recipes")
MOST_FILES = 20

REPEATED_MODULES = {
    *("__init__", "__main__", "_compat", "config", "errors"),
    # A kernel is a folder of these: pallas_kernels/<op>/.
    *("api", "reference", "xla", "blockwise", "pallas_tpu", "pallas_gpu", "mosaic_gpu", "check_samples"),
}
"""Module names that stand for the same thing in several folders."""


def test_imports_between_files_have_no_circle():
    found = circles(file_imports((*CODE, "benchmarks", "notebooks")))
    assert not found, "\n" + "\n".join(" -> ".join(circle) for circle in found)


def test_a_circle_would_be_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert circles(graph) == [["b", "c"]]


def test_no_folder_is_crowded():
    counts = Counter(path.parent for path in sources(*CODE, "benchmarks"))
    crowded = {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > MOST_FILES}
    assert not crowded, f"at most {MOST_FILES} files in one folder: {crowded}"


def test_module_names_are_unique():
    """A command's module may have the name of the module that does its work; so may a package's main module."""
    homes = defaultdict(list)
    for path in sources(*CODE):
        if path.stem not in REPEATED_MODULES and "commands" not in path.parts and "recipes" not in path.parts:
            homes[path.stem].append(module_name(path))
    assert not (repeated := {name: found for name, found in homes.items() if len(found) > 1}), repeated


def test_public_class_names_are_unique():
    homes = defaultdict(list)
    for path in sources(*CODE):
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module_name(path))
    assert not (repeated := {name: found for name, found in homes.items() if len(found) > 1}), repeated


def test_a_lazy_export_never_has_the_name_of_a_module_beside_it():
    """Importing the module would put it in the place of the export."""
    problems = []
    for path in sources("jaxllm"):
        if path.name != "__init__.py" or "lazy_exports" not in path.read_text():
            continue
        beside = {p.stem for p in path.parent.glob("*.py")} | {p.name for p in path.parent.iterdir() if p.is_dir()}
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Tuple):
                names = {e.value for e in node.elts if isinstance(e, ast.Constant)}
                problems += [f"{module_name(path)}: {name}" for name in sorted(map(str, names & beside))]
    assert not problems, problems
