"""Fixtures and settings of the whole test suite. `tests/environment.py` sets up JAX."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import cpu_time, drawn_cases, environment, memory

import hypothesis  # isort: skip
import jax  # isort: skip
import numpy as np  # isort: skip

from tests.proofs import sampling  # isort: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="seed of everything random (default: $JAXLLM_SEED, or the code's own)")
    parser.addoption(
        "--sample-minutes", type=float, help="time of each worker for samples of proofs, default 1; 0: none"
    )
    parser.addoption("--all-cases", action="store_true", help="every case of the tests of which each run draws some")


def pytest_configure(config: pytest.Config) -> None:
    environment.compile_fast()
    # Imports and tracing make millions of objects that stay; to look through them all for cycles takes long.
    gc.set_threshold(20_000, 10, 10)
    config.pluginmanager.register(cpu_time)
    config.pluginmanager.register(memory)
    given = config.getoption("--seed")
    # Through the environment it reaches xdist's workers and child processes.
    os.environ["JAXLLM_SEED"] = str(environment.seed() if given is None else given)
    config.pluginmanager.register(drawn_cases)
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # gw0, gw1, ...
        environment.take_cores(int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    else:
        folder = tempfile.mkdtemp(prefix="jaxllm-samples-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        sampling.begin(Path(folder), config.getoption("--sample-minutes"), repeated=given is not None)
    hypothesis.settings.register_profile(
        "jaxllm",
        max_examples=10,
        deadline=None,  # the first example compiles
        database=None,  # the seed alone decides
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
    )
    hypothesis.settings.load_profile("jaxllm")
    config.addinivalue_line("filterwarnings", f"ignore:{environment.TYPECHECK_RANDOM}")


def pytest_collection_finish() -> None:
    """Modules and tests are never garbage, so the collector leaves them out from here on."""
    gc.freeze()


def pytest_report_header() -> str:
    seed, cache = os.environ["JAXLLM_SEED"], os.path.relpath(os.environ["JAX_COMPILATION_CACHE_DIR"], environment.ROOT)
    return (
        f"seed: {seed} (again: --seed {seed}); jax {jax.__version__}, {environment.DEVICES} cpu devices, cache {cache}"
        f"\nsamples of proofs: {sampling.minutes():g} minutes of each worker (--sample-minutes), drawn by the seed"
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        sampling.end()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        function = getattr(item, "obj", None)
        if getattr(function, "is_hypothesis_test", False):
            function = getattr(function, "__func__", function)
            hypothesis.seed(environment.derive(environment.seed(), item.nodeid.split("[")[0]))(function)

    items[:] = samples_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))


def samples_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Tests in such an order that each worker begins with its share of the samples of proofs, in their order.

    xdist gives each worker one piece of the list, of equal numbers; what is left at the end should be many short tests.
    """
    samples = [item for item in items if item.path.name == "test_sample.py"]
    others = iter([item for item in items if item.path.name != "test_sample.py"])
    dealt: list[pytest.Item] = []
    for worker in range(workers):
        end = len(dealt) + (len(items) - len(dealt)) // (workers - worker)
        dealt += samples[worker::workers]
        dealt += itertools.islice(others, max(0, end - len(dealt)))
    return dealt + list(others)


@pytest.fixture
def float64():
    """64-bit JAX for this test."""
    with environment.x64():
        yield


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the seed and on the test's name."""
    return np.random.default_rng(environment.derive(environment.seed(), request.node.nodeid))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small unbroken run, ``runs/tiny`` in it; not to be written to, see ``copied``."""
    from jaxllm.train import train
    from tests.train import runs

    folder = tmp_path_factory.mktemp("unbroken")
    with runs.shared_programs():
        assert train(runs.run_config(folder)).complete
    return folder


@pytest.fixture(scope="session")
def halted(finished: Path) -> Path:
    """The directory of a run that a signal stopped after seven of its steps; checkpoints after 4 and 7."""
    from tests.train import runs

    with runs.shared_programs():
        return runs.stopped_at(finished, 7, out=finished / "halted")


@pytest.fixture
def shared_programs() -> Iterator[None]:
    """Training runs of this test share programs with those of others, see ``tests.train.runs``."""
    from tests.train import runs

    with runs.shared_programs():
        yield


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """The finished run's directory, copied: ``train(run_config(finished, out=tmp_path))``."""
    return Path(shutil.copytree(finished / "runs" / "tiny", tmp_path / "tiny"))


@pytest.fixture
def stopped(halted: Path, tmp_path: Path) -> Path:
    """The stopped run's directory, copied: ``train(run_config(finished, out=tmp_path))`` resumes it."""
    return Path(shutil.copytree(halted, tmp_path / "tiny"))
