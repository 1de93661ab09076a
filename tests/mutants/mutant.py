"""Mutant: one small fault in the code, and the runner that sees whether the tests named with it fail.

A mutant is killed if its tests pass on the code as it is and fail on a copy of the repository with the fault. `make
proof mutants` runs all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import multiprocessing.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests import environment

CPU_SECONDS, WALL_SECONDS = 300, 3600
"""Time after which a test run ends without a verdict; a run takes about ten seconds of processor time."""
COPIED = ("jaxllm", "pallas_kernels", "sharding", "recipes", "tests", "benchmarks", "docs", "notebooks", "tpu_scripts")
FAILED, PASSED = 1, 0
"""Exit codes of pytest; others mean that it could not run the tests."""


class MutantError(Exception):
    """A mutant is written wrongly: its text does not occur once, or its tests cannot run or fail without it."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """Fault: `old`, which occurs once in `file`, becomes `new`; each of `tests`, run alone, must fail then.

    file: path from the root of the repository.
    tests: node ids of pytest.
    equivalent: why no test can see the fault; empty for a mutant that must be killed.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    def apply(self, text: str) -> str:
        """The file's text with the fault.

        Raises:
            MutantError: `old` does not occur exactly once.
        """
        if (count := text.count(self.old)) != 1 or self.old == self.new:
            raise MutantError(f"{self.file} has the text of mutant {self.name!r} {count} times; it must occur once.")
        return text.replace(self.old, self.new)


def rooms() -> dict[str, list[Mutant]]:
    """Mutants by room: the lists `MUTANTS` of the modules beside this one."""
    here = Path(__file__).resolve().parent
    found = {}
    for file in sorted(here.glob("[a-z]*.py")):
        if file.stem not in ("mutant", "test_mutants"):
            found[file.stem] = list(importlib.import_module(f"tests.mutants.{file.stem}").MUTANTS)
    return found


def survives(mutant: Mutant) -> list[str]:
    """Those of the mutant's tests that do not notice it.

    Raises:
        MutantError: a test cannot run, or fails without the fault.
    """
    copy = _copy()
    for test in mutant.tests:
        _check_sound(test)
    with _changed(copy / mutant.file, mutant):
        codes = {test: _pytest(copy, test) for test in mutant.tests}
    for test, (code, output) in codes.items():
        if code not in (FAILED, PASSED):
            raise MutantError(
                f"pytest {test} gives no verdict with mutant {mutant.name!r}, exit code {code}:\n{output}"
            )
    return [test for test, (code, _) in codes.items() if code == PASSED]


@functools.cache
def _copy() -> Path:
    """Copy of the repository that this process changes, as git sees the working tree."""
    folder = Path(tempfile.mkdtemp(prefix="jaxllm-mutants-"))
    # Unlike atexit, this is run at the end of a worker process too.
    multiprocessing.util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=0)
    listed = environment.git("ls-files", "-co", "--exclude-standard").splitlines()
    for name in listed or [
        path.relative_to(environment.ROOT).as_posix()
        for room in COPIED
        for path in (environment.ROOT / room).rglob("*")
        if path.is_file()
    ]:
        if (source := environment.ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / name)
    return folder


_times = itertools.count(1)


@contextlib.contextmanager
def _changed(file: Path, mutant: Mutant) -> Iterator[None]:
    """The copy's file with the fault in it, inside the block."""
    sound = file.read_text(encoding="utf-8")
    _write(file, mutant.apply(sound))
    try:
        yield
    finally:
        _write(file, sound)


def _write(file: Path, text: str) -> None:
    """Writes a source file with a time that no version of it had: Python finds compiled files by time and size."""
    file.write_text(text, encoding="utf-8")
    os.utime(file, (at := 1_000_000_000 + 10 * next(_times), at))


@functools.cache
def _check_sound(test: str) -> None:
    code, output = _pytest(_copy(), test)
    if code != PASSED:
        raise MutantError(f"pytest {test} does not pass without a mutant, exit code {code}:\n{output}")


def _pytest(copy: Path, test: str) -> tuple[int, str]:
    """(exit code, end of the output) of one test, run in the copy with a cache of its own."""
    with tempfile.TemporaryDirectory() as cache:
        own = {"JAXLLM_CACHE": cache, "PYTHONPATH": str(copy), "JAXLLM_SEED": str(environment.seed())}
        for name in ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
            own[name] = ""
        given = {name: value for name, value in (os.environ | own).items() if value}
        limited = ["/bin/sh", "-c", f'ulimit -t {CPU_SECONDS}; exec "$@"', "sh"]
        command = [
            *limited,
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "--sample-minutes",
            "0",
            test,
        ]
        try:
            done = subprocess.run(command, cwd=copy, env=given, capture_output=True, text=True, timeout=WALL_SECONDS)
        except subprocess.TimeoutExpired:
            raise MutantError(f"pytest {test} takes longer than {WALL_SECONDS} s") from None
    return done.returncode, (done.stdout + done.stderr)[-2000:]
