"""Rules of the source tree: imports go down only, nothing is unpickled, files stay small."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.source_tree import ROOT, module_name, parse, sources, tracked

PACKAGES = ("jaxllm", "pallas_kernels", "sharding", "recipes")

# From the ground up; a module imports from lower floors and from its own room only.
FLOORS = [
    {"sharding"},
    {"pallas_kernels"},
    {
        "jaxllm.config",
        "jaxllm.files",
        "jaxllm.lazy",
        "jaxllm.sockets",
        "jaxllm.svg",
        "jaxllm.sharding",
        "jaxllm.kernels",
        "jaxllm._compat",
        "jaxllm._platform",
        "jaxllm._renamed",
    },
    {"jaxllm.models"},
    {"jaxllm.compiler"},
    {"jaxllm.text", "jaxllm.quant", "jaxllm.tune"},
    {"jaxllm.parallel", "jaxllm.hub", "jaxllm.data", "jaxllm.optim", "jaxllm.checkpoint", "jaxllm.observe"},
    {"jaxllm.peft"},
    {"jaxllm.convert"},
    {"jaxllm.train", "jaxllm.infer"},
    {"jaxllm.effort"},
    {"jaxllm.plan", "jaxllm.serve", "jaxllm.evals", "jaxllm.posttrain"},
    {"jaxllm.simulate"},
    {"jaxllm.cli", "recipes", "tpu_scripts", "benchmarks", "notebooks", "jaxllm"},
]
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
TOP = len(FLOORS) - 1

# The two packages that stand alone, and what they may need.
ALONE = {"sharding": {"jax", "numpy", "flax"}, "pallas_kernels": {"jax", "numpy", "jaxtyping"}}

UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
NNX_RUNS = {
    "jit",
    "grad",
    "value_and_grad",
    "scan",
    "vmap",
    "remat",
    "Optimizer",
    "cached_partial",
    "shard_map",
    "pmap",
}

LONGEST = 800
# Assembled from parts, so that this file does not contain them.
MACHINE_PATHS = [
    r"(?<![\w.])/" + word + r"(?![\w-])" for word in ("work", "root", "tmp", "opt/peers", "home/[a-z]+")
] + [r"\.\." + "/shared"]


def room(module: str) -> str:
    """`jaxllm.train.step.training_step` -> `jaxllm.train`; `sharding.mesh` -> `sharding`."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "jaxllm" else parts[0]


def imports(path: Path) -> list[tuple[str, int]]:
    """(module, line) of every import, those inside functions included; `from jaxllm import data` is jaxllm.data."""
    found = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            assert node.module is not None
            if node.module == "jaxllm":
                found += [(f"jaxllm.{alias.name}", node.lineno) for alias in node.names]
            else:
                found.append((node.module, node.lineno))
    return found


def show(problems: list[str]) -> str:
    return "\n" + "\n".join(problems)


def test_every_room_has_a_floor():
    unknown = {room(module_name(p)) for p in sources(*PACKAGES)} - set(FLOOR)
    assert not unknown, f"put {sorted(unknown)} on a floor: FLOORS in {Path(__file__).name}"


def test_imports_go_down():
    problems = []
    for path in sources(*PACKAGES):
        here = room(module_name(path))
        for module, line in imports(path):
            there = room(module)
            if there not in FLOOR or there == here or FLOOR[here] == TOP:
                continue
            if FLOOR[there] >= FLOOR[here]:
                problems.append(f"{path.relative_to(ROOT)}:{line}: {here} imports {there}, which is not below it")
    assert not problems, show(problems)


@pytest.mark.parametrize("package", ALONE)
def test_packages_that_stand_alone(package):
    problems = []
    for path in sources(package):
        for module, line in imports(path):
            top = module.split(".")[0]
            if top != package and top not in ALONE[package] and top not in sys.stdlib_module_names:
                problems.append(f"{path.relative_to(ROOT)}:{line}: {package} imports {module}")
    assert not problems, show(problems)


def test_sharding_reads_flax_metadata_in_one_file():
    users = {p.name for p in sources("sharding") for module, _ in imports(p) if module.split(".")[0] == "flax"}
    assert len(users) <= 1, users


def test_what_only_tests_may_need():
    """Other libraries' models are read without them."""
    foreign = {"torch", "transformers", "gguf", "sentencepiece", "tiktoken", "accelerate", "safetensors"}
    problems = []
    for path in sources(*PACKAGES):
        for module, line in imports(path):
            if module.split(".")[0] in foreign:
                problems.append(f"{path.relative_to(ROOT)}:{line}: imports {module}")
    assert not problems, show(problems)


def test_packages_do_not_import_tests_or_scripts():
    problems = []
    for path in sources(*PACKAGES):
        for module, line in imports(path):
            if module.split(".")[0] in {"tests", "benchmarks", "tpu_scripts", "notebooks"}:
                problems.append(f"{path.relative_to(ROOT)}:{line}: imports {module}")
    assert not problems, show(problems)


def test_nothing_is_unpickled():
    problems = []
    for path in [p for p in tracked() if p.suffix == ".py"]:
        for module, line in imports(path):
            if module.split(".")[0] in UNPICKLERS:
                problems.append(f"{path.relative_to(ROOT)}:{line}: imports {module}")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
                problems.append(f"{path.relative_to(ROOT)}:{node.value.lineno}: allow_pickle")
    assert not problems, show(problems)


def test_nnx_only_declares():
    """NNX declares, pure functions execute: none of its transformations, under whatever name it is imported."""
    problems = []
    for path in sources(*PACKAGES):
        names = {"nnx"}
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom) and node.module == "flax":
                names |= {a.asname for a in node.names if a.name == "nnx" and a.asname}
            if isinstance(node, ast.Import):
                names |= {a.asname for a in node.names if a.name == "flax.nnx" and a.asname}
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flax.nnx"):
                problems += [f"{path}:{node.lineno}: nnx.{a.name}" for a in node.names if a.name in NNX_RUNS]
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Attribute) and node.attr in NNX_RUNS:
                owner = node.value
                if (isinstance(owner, ast.Name) and owner.id in names) or (
                    isinstance(owner, ast.Attribute) and owner.attr == "nnx"
                ):
                    problems.append(f"{path.relative_to(ROOT)}:{node.lineno}: nnx.{node.attr}")
    assert not problems, show(problems)


def test_protocols_can_be_checked_at_runtime():
    """The tests' type checker needs it; see tests/typecheck.py."""
    problems = []
    for path in sources(*PACKAGES):
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            bases = {ast.unparse(b).split("[")[0].split(".")[-1] for b in node.bases}
            marks = {ast.unparse(d).split(".")[-1] for d in node.decorator_list}
            if "Protocol" in bases and "runtime_checkable" not in marks:
                problems.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} lacks @typing.runtime_checkable")
    assert not problems, show(problems)


def test_files_stay_small():
    problems = []
    for path in tracked():
        if path.suffix in {".py", ".md", ".toml", ".sh", ".yaml", ".yml"} or path.name == "Makefile":
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > LONGEST:
                problems.append(f"{path.relative_to(ROOT)}: {lines} lines, at most {LONGEST}")
    assert not problems, show(problems)


def test_no_path_of_one_machine():
    """Nothing that only exists where it was written."""
    pattern = re.compile("|".join(MACHINE_PATHS))
    problems = []
    for path in tracked():
        if "corpus" in path.parts and path.suffix != ".md":
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # an image
        for number, line in enumerate(text.splitlines(), 1):
            if match := pattern.search(line):
                problems.append(f"{path.relative_to(ROOT)}:{number}: {match.group()!r}")
    assert not problems, show(problems)


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after a statement."""
    code = f"{statement}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


HEAVY = {
    *("jax", "jaxlib", "flax", "optax", "orbax", "tensorstore", "numpy", "matplotlib", "tokenizers", "jinja2"),
    *("tyro", "rich"),
}


def test_import_is_light():
    """Submodules load when they are first used."""
    assert not loaded_by("import jaxllm") & HEAVY


def test_checkpoint_config_does_not_load_orbax():
    assert not loaded_by("from jaxllm.checkpoint import CheckpointConfig") & {"jax", "orbax", "tensorstore"}
