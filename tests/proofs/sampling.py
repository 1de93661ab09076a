"""Samples of proofs in a test run: which proofs come first, and the time budget that ends it.

A run has `--sample-minutes` of each worker's time for them, however many proofs there are. It is spent in this order,
see `order`:

1. proofs whose code changed since their stored record (`covered_code`), and those without one;
2. the others;

and in each, those that were sampled longest ago first: by a log on this machine, `.cache/proofs/sampled.json`, and by a
draw of the seed among those that are not in it. With `--seed` the log is not asked, so that the order comes again.

A unit starts if what it is expected to take is left: as long as it took here, else by the stored record. So samples end
within the budget and what the last units took longer than expected. What does not fit is skipped by name; a proof with
a unit longer than the whole budget runs by `make proof` alone.

    JAXLLM_SAMPLE_MINUTES    as --sample-minutes; default 1; 0 for no samples
    JAXLLM_DUMMY_PROOFS      number of proofs to add that take ten seconds each: `make test` must take no longer
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import environment
from tests.proofs import covered_code, harness, stored
from tests.proofs.harness import Proof, Unit

MINUTES = 1.0
ALONE = 600.0
"""Seconds of a unit that has not been timed and takes the whole machine: it is left to `make proof`."""
UNKNOWN = 60.0
"""Seconds that a unit is expected to take about which nothing is known."""
LONGER = 1.5
"""Seconds of a first unit, which compiles, over the stored mean of all."""
STARTING = 2.0
"""Seconds that a first unit takes for imports, beside."""

COSTLY = 60.0
"""Seconds beyond which a unit is costly; such units have half of the budget, so that others run in every test run."""

_LEDGER = "JAXLLM_SAMPLE_LEDGER"


def log_path() -> Path:
    """When each proof was sampled last on this machine, and how long a unit took."""
    return environment.ROOT / ".cache" / "proofs" / "sampled.json"


def key(proof: Proof) -> str:
    return f"{proof.issue}/{proof.name}"


def order(proofs: Sequence[Proof], seed: int, changed: Collection[str], log: Mapping[str, Any]) -> list[Proof]:
    """Proofs in the order in which a test run samples them.

    Args:
        changed: keys of those whose code changed since their record.
        log: key -> {"at": seconds since 1970, ...} of those sampled on this machine.
    """
    drawn = sorted(proofs, key=key)
    random.Random(environment.derive(seed, "sampling")).shuffle(drawn)
    return sorted(drawn, key=lambda p: (key(p) not in changed, log.get(key(p), {}).get("at", 0.0)))


def expected(proof: Proof, record: Mapping[str, Any] | None, log: Mapping[str, Any]) -> float:
    """Seconds that one unit of a proof will take. `record`: the stored one; `log`: of this machine."""
    if (known := log.get(key(proof))) is not None:
        return known["seconds"]
    if record is None and not proof.parallel:
        return ALONE
    if record is None or proof.quick:  # the record's seconds are of the others too
        return UNKNOWN
    mean = LONGER * record["seconds"] / record["run"]
    if proof.strategy is not None:
        return STARTING + mean * proof.sample
    return STARTING + max(mean, record.get("longest", 0.0))


class Budget:
    """Seconds of all workers of a test run, in a file that they share: units reserve what they are expected to take."""

    def __init__(self, path: Path, seconds: float):
        self.path, self.seconds = path, seconds

    @staticmethod
    def here() -> Budget:
        """The budget of this test run."""
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
        return Budget(Path(os.environ[_LEDGER]) / "ledger", 60 * workers * minutes())

    def start(self, name: str, seconds: float) -> bool:
        """Reserves so many seconds; False if they are not left."""
        with self._lines() as lines:
            fits = self._used(lines) + seconds <= self.seconds
            if seconds > COSTLY:
                costly = [line for line in lines if line["expected"] > COSTLY]
                fits = fits and self._used(costly) + seconds <= self.seconds / 2
            if fits:
                lines.append({"proof": name, "expected": seconds, "reserved": seconds})
            return fits

    @staticmethod
    def _used(lines: list[dict[str, Any]]) -> float:
        return sum(line["reserved"] + line.get("took", 0.0) for line in lines)

    def finish(self, name: str, seconds: float, took: float) -> None:
        """Gives back what was reserved, and takes what it took."""
        with self._lines() as lines:
            lines.append({"proof": name, "expected": seconds, "reserved": -seconds, "took": took, "at": time.time()})

    def finished(self) -> list[dict[str, Any]]:
        """Units that have run: proof, took, at."""
        with self._lines() as lines:
            return [line for line in lines if "took" in line]

    @contextlib.contextmanager
    def _lines(self) -> Iterator[list[dict[str, Any]]]:
        with open(self.path, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            lines = [json.loads(line) for line in file]
            before = len(lines)
            yield lines
            file.writelines(json.dumps(line) + "\n" for line in lines[before:])


def sample(
    proof: Proof, seed: int, budget: Budget, seconds: float, run: Callable[..., Unit] = harness.run_unit
) -> list[Unit]:
    """Runs units of a proof until its sample is full, one fails, or the budget has no room for another.

    Args:
        seconds: that a unit is expected to take.
    """
    units: list[Unit] = []
    for index in proof.sampled(seed):
        if not budget.start(key(proof), seconds):
            break
        started = time.monotonic()
        took = None
        try:
            units.append(run(proof, seed, index, examples=proof.sample))
            took = units[-1].seconds
        finally:
            budget.finish(key(proof), seconds, time.monotonic() - started if took is None else took)
        if units[-1].failure is not None:
            break
        seconds = min(seconds, units[-1].seconds)  # the first one compiled
    return units


def minutes() -> float:
    return float(os.environ.get("JAXLLM_SAMPLE_MINUTES") or MINUTES)


def begin(folder: Path, given: float | None, repeated: bool) -> None:
    """Opens the budget of a test run, for this process and its workers, with the log as it is now.

    Args:
        folder: an empty one, of this run.
        given: minutes, if they were given.
        repeated: the log is not asked.
    """
    if given is not None:
        os.environ["JAXLLM_SAMPLE_MINUTES"] = str(given)
    os.environ[_LEDGER] = str(folder)
    log = _read(log_path())
    if repeated:
        log = {name: entry | {"at": 0.0} for name, entry in log.items()}
    (folder / "log.json").write_text(json.dumps(log))


def end() -> None:
    """Writes to the log what the test run sampled."""
    done = Budget.here().finished()
    log = _read(log_path())
    for name in {line["proof"] for line in done}:
        units = [line for line in done if line["proof"] == name]
        log[name] = {"at": units[-1]["at"], "seconds": round(max(unit["took"] for unit in units), 1)}
    if done:
        log_path().parent.mkdir(parents=True, exist_ok=True)
        part = log_path().with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(log, indent=1))
        os.replace(part, log_path())


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def planned() -> list[tuple[Proof, float]]:
    """Proofs that a test run may sample, in its order, each with the seconds that a unit is expected to take."""
    proofs = [p for issue in harness.issues() for p in harness.load(issue).values() if p.sample > 0] + _dummies()
    records = {issue: {case["name"]: case for case in stored.read(issue)["cases"]} for issue in harness.issues()}
    tree = covered_code.Tree.here()
    covers = {module: tree.covers(module) for module in {proof.module for proof in proofs}}
    covered_code.keep()
    log = _read(Path(os.environ[_LEDGER]) / "log.json")

    def record(proof: Proof) -> dict[str, Any] | None:
        return records.get(proof.issue, {}).get(proof.name)

    changed = {key(p) for p in proofs if (record(p) or {}).get("covers") != covers[p.module]}
    return [(p, expected(p, record(p), log)) for p in order(proofs, environment.seed(), changed, log)]


def _dummies() -> list[Proof]:
    """Proofs that take ten seconds each, as many as $JAXLLM_DUMMY_PROOFS says."""

    def burns(seed: int) -> None:
        until = time.monotonic() + 10
        while time.monotonic() < until:
            sum(range(1000))

    number = int(os.environ.get("JAXLLM_DUMMY_PROOFS") or 0)
    return [Proof("dummy", f"dummy_{i}", burns, 3, 1, {}, None, 20, False, True) for i in range(number)]
