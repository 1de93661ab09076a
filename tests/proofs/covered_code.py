"""Code that a proof covers: its module and what that imports of this repository, directly or not, with a digest.

A record of a proof counts for the code that it ran. That code is found in the source, without running it: the imports
of the trial's module, those inside functions included, and the imports of what they name.

- A name imported from a package leads to the module that defines it, by the imports and the tables of the package's
  `__init__.py`, and not to everything else that the package exports. So does an attribute of an imported package. A
  package that is passed around as a value leads to all its modules.
- A text that is the dotted name of a module (`[sys.executable, "-m", "jaxllm.cli"]`), or holds lines that import one,
  leads there.
- `ALSO_COVERS = ("tests/kernels/*_body.py",)` in a module adds what cannot be read off: patterns of files, of Python or
  not, from the root of the repository.
- `tests/proofs/harness.py` belongs to none: it counts trials and claims nothing.

The digest is over names of files and their syntax trees, without docstrings, comments and layout: rewording changes
nothing. Files that are not Python count with every byte.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import functools
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tests import environment

ROOTS = ("jaxllm", "pallas_kernels", "sharding", "recipes", "tests", "benchmarks", "notebooks", "tpu_scripts")
NOT_COVERED = ("tests/proofs/harness.py",)

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_IMPORT = re.compile(r"^\s*from ([\w.]+) import (.+)$|^\s*import ([\w.]+)", re.MULTILINE)
_SELF = hashlib.sha1(Path(__file__).read_bytes()).hexdigest()[:8]


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A source file, as far as coverage needs it."""

    digest: str
    """Hash of the syntax tree without docstrings."""
    uses: tuple[str, ...]
    """Dotted names that the code imports, or reaches as attributes of what it imports."""
    values: tuple[str, ...]
    """Dotted names of imports that are used bare, as values."""
    texts: tuple[str, ...]
    """Strings that look like dotted names."""
    exports: Mapping[str, str]
    """Name -> dotted name of what an `__init__.py` gives under it."""
    defines: tuple[str, ...]
    """Names that the module's top level defines itself."""
    patterns: tuple[str, ...]
    """ALSO_COVERS."""


class Tree:
    """The repository's files at one commit, or as they lie in the working tree."""

    def __init__(self, names: Iterable[str], read: Callable[[str], tuple[str, Callable[[], bytes]]]):
        """`read` gives a file's content by an identifier that no other content has, and a function that reads it."""
        self.names = frozenset(names)
        self._read = functools.cache(read)

    @staticmethod
    def here() -> Tree:
        """The working tree: files that git sees, committed or not."""
        listed = environment.git("ls-files", "-co", "--exclude-standard", "--", *ROOTS, "README.md", "docs")
        root = environment.ROOT
        names = listed.splitlines() or [
            path.relative_to(root).as_posix()
            for folder in ROOTS
            for path in (root / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        ]

        def read(name: str) -> tuple[str, Callable[[], bytes]]:
            content = (root / name).read_bytes()
            return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(), lambda: content

        return Tree((n for n in names if (root / n).is_file()), read)

    @staticmethod
    def at(commit: str) -> Tree:
        """The files of a commit.

        Raises:
            LookupError: git does not know the commit.
        """
        listed = environment.git("ls-tree", "-r", commit, "--", *ROOTS, "README.md", "docs")
        if not listed:
            raise LookupError(f"git knows no commit {commit}.")
        blobs = {name: entry.split()[2] for entry, name in (line.split("\t") for line in listed.splitlines())}

        def read(name: str) -> tuple[str, Callable[[], bytes]]:
            return blobs[name], lambda: _blob(blobs[name])

        return Tree(blobs, read)

    def parsed(self, name: str) -> Parsed:
        identifier, content = self._read(name)
        return _known.parsed(identifier, name.endswith("__init__.py"), content)

    def digest(self, name: str) -> str:
        """Hash of one file: of its syntax tree, or of its bytes."""
        return self.parsed(name).digest if name.endswith(".py") else self._read(name)[0]

    @functools.cached_property
    def _modules(self) -> dict[str, str]:
        """Dotted name -> file, of modules and packages; of a folder without `__init__.py` the text ends in "/"."""
        paths = [name for name in self.names if name.endswith(".py")]
        folders = {parent.as_posix() for name in paths for parent in PurePosixPath(name).parents} - {"."}
        found = {folder.replace("/", "."): f"{folder}/" for folder in folders}
        return found | {n.removesuffix(".py").removesuffix("/__init__").replace("/", "."): n for n in paths}

    def _is_package(self, dotted: str) -> bool:
        return self._modules.get(dotted, "").endswith(("/", "/__init__.py"))

    def _leads_to(self, dotted: str, depth: int = 0) -> set[str]:
        """Files that a dotted name stands for; none for a package alone, and for modules outside the repository."""
        at, *rest = dotted.split(".")
        while at in self._modules:
            file = self._modules[at]
            if not self._is_package(at):
                return {file}
            if not rest or depth > 8:
                return set()
            name, *rest = rest
            home = self.parsed(file) if file.endswith(".py") else None
            if home and home.exports.get(name, f"{at}.{name}") != f"{at}.{name}":
                target = home.exports[name]
                if target.startswith(f"{at}.{name}."):  # a name that its own module has too: jaxllm.cli.main.main
                    return {self._modules[f"{at}.{name}"]} if f"{at}.{name}" in self._modules else set()
                below = target.partition(".")[0] not in self._modules  # a table's name of a module of the package
                return self._leads_to(".".join([f"{at}.{target}" if below else target, *rest]), depth + 1)
            if home and name in home.defines and f"{at}.{name}" not in self._modules:
                return {file}
            at = f"{at}.{name}"
        return set()

    @functools.cached_property
    def _neighbours(self) -> Callable[[str], frozenset[str]]:
        @functools.cache
        def neighbours(name: str) -> frozenset[str]:
            if not name.endswith(".py"):
                return frozenset()
            parsed = self.parsed(name)
            found: set[str] = set()
            for dotted in parsed.uses:
                found |= self._leads_to(dotted)
            for dotted in parsed.values:
                if self._is_package(dotted):
                    folder = dotted.replace(".", "/") + "/"
                    found |= {n for n in self.names if n.startswith(folder) and n.endswith(".py")}
            for text in parsed.texts:
                if text in self._modules and not self._is_package(text):
                    found.add(self._modules[text])
                elif f"{text}.__main__" in self._modules:
                    found.add(self._modules[f"{text}.__main__"])
            for pattern in parsed.patterns:
                found |= set(fnmatch.filter(self.names, pattern))
            return frozenset(found.difference(NOT_COVERED))

        return neighbours

    def covered(self, module: str) -> frozenset[str]:
        """Files that a module's code reaches, its own included; none if there is no such module."""
        if (start := self._modules.get(module)) is None:
            return frozenset()
        found, ahead = {start}, [start]
        while ahead:
            new = self._neighbours(ahead.pop()) - found
            found |= new
            ahead += new
        return frozenset(found)

    def covers(self, module: str) -> str:
        """Digest of the code that a trial of this module covers; the record keeps it."""
        lines = (f"{name} {self.digest(name)}\n" for name in sorted(self.covered(module)))
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


class _Known:
    """Parsed files by their content, kept in .cache so that each is parsed once."""

    def __init__(self) -> None:
        self._entries: dict[str, Parsed] | None = None
        self._new = 0

    def _path(self) -> Path:
        return environment.ROOT / ".cache" / "proofs" / f"parsed-{_SELF}.json"

    def parsed(self, identifier: str, package: bool, content: Callable[[], bytes]) -> Parsed:
        if self._entries is None:
            try:
                kept = json.loads(self._path().read_text())
            except (OSError, ValueError):
                kept = {}
            self._entries = {key: _frozen(value) for key, value in kept.items()}
        key = identifier + ("/" if package else "")
        if key not in self._entries:
            self._entries[key] = parse(content().decode(), package)
            self._new += 1
        return self._entries[key]

    def keep(self) -> None:
        """Writes what was parsed."""
        if not self._new or self._entries is None:
            return
        path = self._path()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({key: vars(value) for key, value in self._entries.items()}))
        os.replace(part, path)
        self._new = 0


_known = _Known()
keep = _known.keep


def _frozen(kept: Mapping[str, Any]) -> Parsed:
    return Parsed(**{name: tuple(value) if isinstance(value, list) else value for name, value in kept.items()})


def _blob(identifier: str) -> bytes:
    """Content of a file that git keeps."""
    return subprocess.run(
        ["git", "cat-file", "blob", identifier], cwd=environment.ROOT, capture_output=True, check=True
    ).stdout


def parse(source: str, package: bool = False) -> Parsed:
    """A file's digest and imports. `package`: it is an `__init__.py`, whose imports are what it exports."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    hashed = hashlib.sha256()
    _update(hashed.update, tree)

    docstrings = {id(node.value) for node in nodes if _is_docstring(node)}
    typing = _only_for_types(nodes)  # imports that only a package's tables repeat when it runs
    bound: dict[str, str] = {}  # local name -> dotted name
    uses: set[str] = set()
    texts: set[str] = set()
    chains: list[tuple[ast.Name, list[str]]] = []  # name.attribute.attribute
    for node in nodes:
        if id(node) in typing and not package:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                uses |= {alias.name} if id(node) not in typing else set()
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                bound[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                uses |= {f"{node.module}.{alias.name}"} if id(node) not in typing else set()
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute):
            chain, start = [node.attr], node.value
            while isinstance(start, ast.Attribute):
                chain, start = [start.attr, *chain], start.value
            if isinstance(start, ast.Name):
                chains.append((start, chain))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            for package, names, module in _IMPORT.findall(node.value):
                uses |= {f"{package}.{name.strip()}" for name in names.split(",")} if package else {module}
            text = node.value.partition(":")[0]
            if len(text) < 100 and _DOTTED.fullmatch(text):
                texts.add(text)

    ours = {name: dotted for name, dotted in bound.items() if dotted.partition(".")[0] in ROOTS}
    uses |= {".".join([ours[start.id], *chain]) for start, chain in chains if start.id in ours}
    starts = {id(start) for start, _ in chains}
    bare = (node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    values = {ours[node.id] for node in bare if node.id in ours and id(node) not in starts}

    exports = _tables(tree) | bound if package else {}
    return Parsed(
        digest=hashed.hexdigest()[:16],
        uses=tuple(sorted(u for u in uses if u.partition(".")[0] in ROOTS)),
        values=tuple(sorted(values)),
        texts=tuple(sorted(t for t in texts if t.partition(".")[0] in ROOTS)),
        exports=exports,
        defines=tuple(sorted(_defined(tree))),
        patterns=_patterns(tree),
    )


def _is_docstring(node: ast.AST) -> bool:
    """Whether a statement is a text alone: a docstring, or what stands below a constant or a field to the same end."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _update(update: Callable[[bytes], Any], node: Any) -> None:
    """Hashes a syntax tree by what it says: positions and what a version of Python has no field for are left out."""
    if isinstance(node, ast.AST):
        if _is_docstring(node):
            return
        update(b"(" + type(node).__name__.encode())
        for name in node._fields:
            value = getattr(node, name, None)
            if value is not None and value != [] and name not in ("ctx", "kind", "type_comment"):
                update(b" " + name.encode() + b"=")
                _update(update, value)
        update(b")")
    elif isinstance(node, list):
        for item in node:
            _update(update, item)
    else:
        update(repr(node).encode())


def _only_for_types(nodes: list[ast.AST]) -> set[int]:
    """Nodes below `if TYPE_CHECKING`."""
    return {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }


def _tables(tree: ast.Module) -> dict[str, str]:
    """Exports by tables of texts, {module: (name, ...)} or {name: module}, at the top of an `__init__.py`."""
    found: dict[str, str] = {}
    for statement in tree.body:
        for table in ast.walk(statement) if isinstance(statement, ast.Assign | ast.AnnAssign) else ():
            for key, value in zip(table.keys, table.values, strict=True) if isinstance(table, ast.Dict) else ():
                match key, value:
                    case ast.Constant(value=str(module)), ast.Tuple(elts=names):
                        found |= {n.value: f"{module}.{n.value}" for n in names if isinstance(n, ast.Constant)}
                    case ast.Constant(value=str(name)), ast.Constant(value=str(module)):
                        found[name] = f"{module}.{name}"
    return found


def _defined(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(statement.name)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found |= {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    return found


def _patterns(tree: ast.Module) -> tuple[str, ...]:
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "ALSO_COVERS":
            return tuple(ast.literal_eval(statement.value))
    return ()
