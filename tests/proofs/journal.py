"""Journal of finished units on disk, so that a stopped run of proofs resumes.

A run resumes if the code is the same: the contents of jaxllm, pallas_kernels, sharding, recipes and tests, committed
or not, and the versions of Python and the packages. Other files, such as documents, may change meanwhile.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path

from tests import environment
from tests.proofs.harness import Unit

CODE = ("jaxllm", "pallas_kernels", "sharding", "recipes", "tests")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "hypothesis")
FOLDER = environment.ROOT / ".cache" / "proofs"


@dataclasses.dataclass(frozen=True)
class Origin:
    """Origin of a run's results: code, versions, seed."""

    commit: str
    dirty: bool
    code: str
    """Digest of the contents of CODE."""
    versions: dict[str, str]

    @staticmethod
    def here() -> Origin:
        versions = {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in PACKAGES}
        dirty = bool(environment.git("status", "--porcelain", "--", *CODE))
        return Origin(environment.git("rev-parse", "HEAD") or "unknown", dirty, _code_digest(), versions)

    def key(self) -> str:
        text = json.dumps([self.code, self.versions], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Journal:
    """Append-only file of one issue's finished units, for one origin and one seed."""

    def __init__(self, path: Path, origin: Origin, seed: int):
        self.path, self.origin, self.seed = path, origin, seed
        self.units: list[Unit] = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # cut short when the run was killed; that unit runs again
            self.units.append(Unit(**{**entry, "seen": tuple(entry["seen"])}))
        self.resumed = bool(self.units)
        path.parent.mkdir(parents=True, exist_ok=True)

    @staticmethod
    def open(issue: str, seed: int | None = None, folder: Path = FOLDER) -> Journal:
        """The journal to go on with: of the given seed, or of the newest unfinished run of this code, or a new one."""
        origin = Origin.here()
        if seed is None:
            known = sorted(folder.glob(f"{issue}/{origin.key()}-*.jsonl"), key=lambda p: p.stat().st_mtime)
            seed = int(known[-1].stem.split("-")[1]) if known else environment.seed()
        return Journal(folder / issue / f"{origin.key()}-{seed}.jsonl", origin, seed)

    def add(self, unit: Unit) -> None:
        """Keeps a unit that passed; on disk when this returns."""
        self.units.append(unit)
        with open(self.path, "a") as file:
            file.write("\n" + json.dumps(dataclasses.asdict(unit)))  # the last line may have been cut short
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> None:
        """Marks the run as stored: the next one starts anew."""
        if self.path.exists():
            self.path.rename(self.path.with_suffix(".done"))


def _code_digest() -> str:
    """Digest of names and contents of the code's files, as git sees them (ignored files left out)."""
    listed = environment.git("ls-files", "-co", "--exclude-standard", "--", *CODE)
    names = listed.splitlines() or [
        p.relative_to(environment.ROOT).as_posix()
        for folder in CODE
        for p in (environment.ROOT / folder).rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    ]
    digest = hashlib.sha256()
    for name in sorted(set(names)):
        file = environment.ROOT / name
        if file.is_file():
            digest.update(f"{name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()
