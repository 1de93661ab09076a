"""Loading a model for a command, with a progress bar on the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from jaxllm.convert.load import LoadedModel


def load_with_progress(
    name: str,
    dtype: Literal["float32", "bfloat16"] | None,
    layers: Literal["stacked", "apart"] = "stacked",
    mesh: str | None = None,
) -> LoadedModel:
    """``load_model``, showing on the terminal how far it is; onto a mesh to be served on."""
    from jaxllm.infer import load_model
    from jaxllm.infer.runner.serving_mesh import mesh_of

    over = None if mesh is None else mesh_of(mesh)
    with progress_bar("loading", name) as progress:
        return load_model(name, mesh=over, dtype=dtype, layers=layers, progress=progress)


@contextlib.contextmanager
def progress_bar(verb: str, what: str) -> Iterator[Callable[[str, int, int], None]]:
    """``progress(item, done, total)`` moves a bar on the terminal, which is gone in the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = TextColumn(verb), BarColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda item, done, total: bar.update(task, completed=done, total=total)
