"""Wheel: built offline, installed outside the clone, and used there; and the editable install beside a clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests import environment

pytest.importorskip("setuptools", reason="building a wheel offline needs setuptools in this environment")
PACKAGES = ("jaxllm", "pallas_kernels", "sharding", "recipes")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Copy of what a wheel is made of: building leaves files beside the source."""
    copy = tmp_path_factory.mktemp("clone") / "jaxllm"
    copy.mkdir()
    for name in PACKAGES:
        shutil.copytree(environment.ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(environment.ROOT / name, copy)
    return copy


def elsewhere(folder: Path, installed: Path, *words: str) -> str:
    """Output of Python in a folder, with a package's directory and this environment's other packages."""
    # -S: no .pth file of this environment is read, so nothing leads to the clone.
    paths = [installed, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    variables = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "JAX_PLATFORMS": "cpu", "JAXLLM_CACHE": str(folder)}
    done = subprocess.run(
        [sys.executable, "-S", *words],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.drawn(0.2)
def test_a_wheel_has_the_packages_alone_and_trains_outside_the_clone(source, tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    build = [
        *pip,
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        tmp_path,
        source,
    ]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(installed)
    assert {name.split("/")[0] for name in names} == {
        *PACKAGES,
        next(n for n in names if "dist-info" in n).split("/")[0],
    }
    files = {
        str(path.relative_to(source)) for name in PACKAGES for path in (source / name).rglob("*") if path.is_file()
    }
    assert {name for name in files if not Path(name).name.startswith(".")} <= set(names)
    away = tmp_path / "away"
    away.mkdir()
    assert elsewhere(away, installed, "-c", "import jaxllm; print(jaxllm.__file__)").startswith(str(installed))
    assert "learns Shakespeare" in elsewhere(away, installed, "-m", "jaxllm.cli", "train", "--help")
    size = [
        "--model.layers",
        "1",
        "--data.batch-size",
        "2",
        "--data.seq-len",
        "16",
        "--steps",
        "1",
        "--eval-every",
        "0",
    ]
    tiny = ["--data.tokenizer", "byte", "--model.vocab-size", "272"]
    elsewhere(away, installed, "-m", "jaxllm.cli", "train", "quickstart", *size, *tiny)
    assert (away / "runs" / "quickstart" / "receipt.json").is_file()


def test_an_editable_install_is_found_beside_the_clone(source, tmp_path):
    """In the folder above a clone, ``jaxllm`` is a folder without a module: it must not be taken for the package."""
    build = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, tmp_path], cwd=source, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    look = f"import site; site.addsitedir({str(installed)!r}); import jaxllm; print(jaxllm.__file__)"
    found = elsewhere(source.parent, tmp_path / "nothing", "-c", look)
    assert found.strip() == str(source / "jaxllm" / "__init__.py")
