"""Notebooks from their sources: `NAME.py`, in percent format, is written, linted and run; Colab opens `NAME.ipynb`.

    python -m notebooks.build                       makes all .ipynb
    python -m notebooks.build run NAME [FOLDER]     runs the cells in this process; figures go to FOLDER as PNG

A line `# %%` begins a cell of code, `# %% [markdown]` one of text, whose lines are comments. The cell that installs
jaxllm where it is missing comes second in each, the line `# %% [setup EXTRAS]`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "build"))

SETUP = """# Installs jaxllm where it is missing: on Colab's CPU, GPU and TPU runtimes, and in any Jupyter.
import importlib.util, pathlib, re, shutil, subprocess, sys

REPOSITORY = ""  # of jaxllm, an address for git; not needed in a clone of it
if importlib.util.find_spec("jaxllm") is None:
    here = pathlib.Path.cwd().resolve()
    clones = [folder for folder in (here, *here.parents) if (folder / "jaxllm/__init__.py").is_file()]
    if not (clones or REPOSITORY):
        raise SystemExit(
            "jaxllm is not installed, and this notebook lies in no clone of it. Set REPOSITORY in this cell to the "
            "address that you would give `git clone`, or clone it and %cd into the clone; then run the cell again."
        )
    needs = [f"jaxllm[EXTRAS] @ {clones[0].as_uri() if clones else 'git+' + REPOSITORY}"]
    if shutil.which("nvidia-smi"):  # the jax that fits the driver
        said = subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout
        cuda = re.search(r"CUDA Version: (\\d+)", said)
        needs += [f"jax[cuda{min(13, int(cuda[1]))}]"] if cuda else []
    elif any(pathlib.Path("/dev").glob("accel*")) or any(pathlib.Path("/dev/vfio").glob("[0-9]*")):
        needs += ["jax[tpu]"]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *needs], check=True)
    importlib.invalidate_caches()"""


def cells(source: str) -> list[tuple[str, str]]:
    """(kind, text) of each cell of a source in percent format; kinds are "markdown" and "code"."""
    parts = re.split(r"^# %%(.*)$", source, flags=re.MULTILINE)
    assert not parts[0].strip(), "a notebook's source begins with `# %% [markdown]`"
    found = []
    for mark, body in zip(parts[1::2], parts[2::2], strict=True):
        mark, body = mark.strip(), body.strip("\n")
        if mark == "[markdown]":
            found.append(("markdown", re.sub(r"^# ?", "", body, flags=re.MULTILINE)))
        elif setup := re.fullmatch(r"\[setup(.*)\]", mark):
            extras = f"[{setup[1].strip()}]" if setup[1] else ""
            found.append(("code", SETUP.replace("[EXTRAS]", extras)))
        else:
            assert not mark, f"# %% {mark}: unknown kind of cell; [markdown], [setup EXTRAS] or nothing"
            found.append(("code", body))
    return found


def notebook(name: str) -> str:
    """The .ipynb (nbformat 4.5), without outputs."""
    made: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells((FOLDER / f"{name}.py").read_text())):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"{name}-{number}", "metadata": {}}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        made.append(cell | {"source": text.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def run(name: str, folder: Path | None = None) -> int:
    """Runs the cells one after the other, as Jupyter would; returns how many figures were drawn."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    space: dict[str, Any] = {"__name__": "__main__"}
    drawn = 0
    for number, (kind, text) in enumerate(cells((FOLDER / f"{name}.py").read_text())):
        if kind != "code":
            continue
        exec(compile(text, f"{name}, cell {number}", "exec"), space)
        for figure in map(pyplot.figure, pyplot.get_fignums()):
            drawn += 1
            if folder is not None:
                figure.savefig(folder / f"{name}_{drawn}.png", dpi=80, bbox_inches="tight")
        pyplot.close("all")
    return drawn


def main(argv: list[str]) -> None:
    """See the module."""
    if argv[:1] == ["run"]:
        folder = Path(argv[2]) if len(argv) > 2 else None
        print(f"{run(argv[1], folder)} figures")
        return
    for name in NAMES:
        (FOLDER / f"{name}.ipynb").write_text(notebook(name))


if __name__ == "__main__":
    main(sys.argv[1:])
