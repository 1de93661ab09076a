"""``jaxllm checkpoint``: lists, verifies, compares, reshards and removes checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from jaxllm.cli.command_parser import parse_command
from jaxllm.config import closest

if TYPE_CHECKING:
    from jaxllm.checkpoint import Checkpointer
    from jaxllm.checkpoint.checkpoint_reader import CheckpointLeaf
    from jaxllm.checkpoint.checkpoint_writer import StreamedLeaf
    from jaxllm.checkpoint.storage.checkpoint_manifest import Manifest

Where = Annotated[str, tyro.conf.Positional]
"""Location of checkpoints: a run's directory, a directory of checkpoints, or its URL."""


def checkpoint(argv: list[str]) -> int:
    """List, verify, compare, reshard, remove checkpoints: `jaxllm checkpoint COMMAND WHERE`."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: jaxllm checkpoint COMMAND WHERE ... [--setting value ...]\n\ncommands:")
        for name, function in COMMANDS.items():
            print(f"  {name:8} {(function.__doc__ or '').splitlines()[0]}")
        print("\nWHERE is a run's directory, a directory of checkpoints, or its URL (gs://, s3://, ...).")
        print("`jaxllm checkpoint COMMAND --help` explains a command.")
        return 0
    if argv[0] not in COMMANDS:
        print(f"jaxllm checkpoint: no command {argv[0]!r}.{closest(argv[0], COMMANDS)} "
              f"There are: {', '.join(COMMANDS)}.", file=sys.stderr)  # fmt: skip
        return 2
    return parse_command(COMMANDS[argv[0]], argv[1:], f"jaxllm checkpoint {argv[0]}")


def ls(where: Where, /, leaves: bool = False, step: int | None = None) -> int:
    """List checkpoints, or with --leaves the leaves of one.

    Args:
        where: a run's directory, a directory of checkpoints, or its URL.
        leaves: list path, shape, dtype and hash of every leaf.
        step: step of the checkpoint whose leaves are listed; the newest by default.
    """
    from jaxllm.checkpoint import CheckpointCorruptError

    with opened(where) as found:
        if leaves:
            for path, leaf in found.manifest(step).leaves.items():
                print(f"{path:60} {leaf.dtype:10} {list(leaf.shape)!s:20} {leaf.hash[:19]}")
            return 0
        steps = found.steps()
        for one in steps:
            try:
                manifest, meta = found.manifest(one), found.read_meta(one)
            except CheckpointCorruptError as error:
                print(f"{one:>10}  DAMAGED: {error.finding}")
                continue
            loss = meta.get("metrics", {}).get("loss")
            print(f"{one:>10}  {size(manifest.nbytes):>11}  {len(manifest.leaves):>5} leaves  "
                  f"{', '.join(dict.fromkeys(p.split('/')[0] for p in manifest.leaves))}"
                  + (f"  loss {loss:.4f}" if loss is not None else ""))  # fmt: skip
        for name in found.set_aside():
            print(f"{name}: set aside; `jaxllm checkpoint gc --set-aside` removes it")
        if not steps:
            print(f"no checkpoint in {found.directory}")
    return 0 if steps else 1


def verify(where: Where, /, step: int | None = None) -> int:
    """Verify the hashes of all bytes of checkpoints; the exit status is 1 if one is damaged.

    Args:
        where: a run's directory, a directory of checkpoints, or its URL.
        step: step of the checkpoint to verify; all by default.
    """
    from jaxllm.checkpoint import CheckpointCorruptError

    bad = 0
    with opened(where) as found:
        steps = [found.manifest(step).step] if step is not None else found.steps()
        for one in steps:
            try:
                with bar(f"verifying step {one}") as progress:
                    found.verify(one, progress)
                print(f"step {one}: good, {size(found.manifest(one).nbytes)}")
            except CheckpointCorruptError as error:
                bad += 1
                print(f"step {one}: DAMAGED: {error.finding}")
        if not steps:
            print(f"no checkpoint in {found.directory}")
    return 1 if bad or not steps else 0


def diff(
    first: Where, second: Where, /, first_step: int | None = None, second_step: int | None = None, only: str = ""
) -> int:
    """Compare two checkpoints leaf by leaf; the exit status is 1 if they differ.

    Args:
        first: a run's directory, a directory of checkpoints, or its URL.
        second: location of the second checkpoint; may be the same as the first.
        first_step: step of the first checkpoint; the newest by default.
        second_step: step of the second checkpoint; the newest by default.
        only: path of the subtree to compare, such as params; everything by default.
    """
    with opened(first) as one, opened(second) as two:
        a, b = one.manifest(first_step), two.manifest(second_step)
        left, right = subtree_leaves(a, only), subtree_leaves(b, only)
        lines = [f"{path}: only in the first" for path in left if path not in right]
        lines += [f"{path}: only in the second" for path in right if path not in left]
        both = [path for path in left if path in right]
        readers = one.open_leaves(a.step), two.open_leaves(b.step)
        with bar("comparing") as progress:
            for number, path in enumerate(both):
                progress(path, number, len(both))
                x, y = left[path], right[path]
                if (x.shape, x.dtype) != (y.shape, y.dtype):
                    lines.append(f"{path}: {x.dtype} {list(x.shape)}, and {y.dtype} {list(y.shape)}")
                elif x.hash != y.hash:
                    lines.append(f"{path}: {distance(readers[0][path], readers[1][path])}")
        for key in sorted({*(m := one.read_meta(a.step)), *(n := two.read_meta(b.step))}):
            if m.get(key) != n.get(key):
                lines.append(f"meta {key}: differs")
    print("\n".join(lines) if lines else "equal")
    print(f"{len(both)} leaves in both, step {a.step} and step {b.step}")
    return 1 if lines else 0


def reshard(
    where: Where,
    out: Where,
    /,
    step: int | None = None,
    only: tuple[str, ...] = (),
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None,
    layers: Literal["stacked", "single"] | None = None,
    names: Literal["hf", "jaxllm"] | None = None,
) -> int:
    """Rewrite a checkpoint: a subtree, another dtype, stacked or single layers, Hugging Face's names; streamed.

    Another mesh needs no conversion: every command reads the slices that it needs. With --only params, OUT is a model
    that generate, chat and eval open.

    Args:
        where: a run's directory, a directory of checkpoints, or its URL.
        out: directory to create, or a URL.
        step: step of the checkpoint; the newest by default.
        only: paths of the subtrees to keep, such as params; everything by default.
        dtype: dtype to convert floating-point leaves to.
        layers: single: one leaf per layer; stacked: one leaf for all layers of a group, the layout of models here.
        names: hf: parameter names and shapes of the model's family in transformers; jaxllm: the names used here.
    """
    from jaxllm.checkpoint import Checkpointer, CheckpointError
    from jaxllm.checkpoint.relayout import RelayoutOptions, leaf_sources, relayout_leaves

    place, words = (f"{out}/checkpoints", Path(where) / "tokenizer") if "://" not in out else (out, None)
    if "://" not in out and Path(out).exists():
        raise CheckpointError(f"{out} exists; choose another name, or move it away.")
    if names is not None and (only != ("params",) or layers is not None):
        raise CheckpointError("--names is for parameters alone, with stacked layers: give --only params, no --layers.")
    with opened(where) as found, Checkpointer(place) as target, bar("writing") as progress:
        manifest = found.manifest(step)
        meta = found.read_meta(manifest.step)
        if dtype is not None and "config" in meta:
            meta["config"]["model"] |= {"param_dtype": dtype, "dtype": dtype}
        layout = RelayoutOptions(only, dtype, layers)
        leaves = relayout_leaves(
            found.open_leaves(manifest.step), leaf_sources(manifest.leaves, layout), dtype, progress
        )
        if names is not None:
            leaves = renamed(leaves, found, manifest.step, meta, names)
            meta["names"] = names
        target.save_streamed(manifest.step, leaves, meta)
        made = target.manifest(manifest.step)
    if words is not None and words.is_dir():
        import shutil

        shutil.copytree(words, Path(out) / "tokenizer")
    print(f"{out}: step {made.step}, {len(made.leaves)} leaves, {size(made.nbytes)}")
    return 0


def gc(
    where: Where,
    /,
    keep_last: int = 3,
    keep_every: int | None = None,
    set_aside: bool = False,
    dry_run: bool = False,
) -> int:
    """Remove old checkpoints, but never the newest intact one.

    Args:
        where: a run's directory, a directory of checkpoints, or its URL; no run may be saving there.
        keep_last: number of newest checkpoints to keep.
        keep_every: keep checkpoints whose step is a multiple of this too.
        set_aside: also remove checkpoints that were set aside: damaged ones, and those after a rollback.
        dry_run: only print what would be removed.
    """
    from jaxllm.checkpoint import CheckpointConfig, Checkpointer

    with Checkpointer(
        checkpoint_directory(where), CheckpointConfig(keep_last=keep_last, keep_every=keep_every)
    ) as found:
        before = found.steps()
        gone = found.collect(set_aside=set_aside, dry=dry_run)
    verb = "would remove" if dry_run else "removed"
    print(f"{verb}: {', '.join(gone) if gone else 'nothing'}; {len(before)} checkpoints before")
    return 0


def renamed(
    leaves: Mapping[str, StreamedLeaf], found: Checkpointer, step: int, meta: dict[str, Any], names: str
) -> dict[str, StreamedLeaf]:
    """Leaves renamed from this package's parameter names to transformers' (``names`` "hf"), or back ("jaxllm")."""
    import numpy as np

    from jaxllm.checkpoint.checkpoint_writer import StreamedLeaf
    from jaxllm.checkpoint.errors import CheckpointError
    from jaxllm.config import from_dict
    from jaxllm.hub.families.config_json import config_json
    from jaxllm.hub.families.families import family
    from jaxllm.hub.huggingface import (
        CarriedTensors,
        hf_tensors,
        leaves_by_path,
        match_tensors,
        sources_by_leaf,
        stream_leaf,
    )
    from jaxllm.models import DecoderConfig, functional

    if (meta.get("names") or "jaxllm") == names:
        raise CheckpointError(f"{found.directory} has the names of --names {names} already.")
    config = from_dict(DecoderConfig, meta["config"]["model"], "the checkpoint's model")
    source = meta.get("source") or config_json(config, meta["config"].get("data", {}).get("seq_len"), {})
    saved = found.map_leaves(step)
    some = next(iter(leaves.values())).dtype
    out: dict[str, StreamedLeaf] = {}
    if names == "hf":
        for name, tensor in hf_tensors(source, config, saved, CarriedTensors()).items():
            out[f"params/{name}"] = StreamedLeaf(tuple(tensor.shape), some, read_lazily(tensor, some))
        return out
    ours = leaves_by_path(functional(config).abstract())
    wanted, _ = match_tensors(family(source).table, config, ours, saved)
    sources = sources_by_leaf(wanted, saved)
    for path, leaf in ours.items():
        out[f"params/{path}"] = StreamedLeaf(tuple(leaf.shape), np.dtype(some), stream_leaf(sources[path], some, path))
    return out


def read_lazily(tensor: Any, dtype: Any) -> Iterator[Any]:
    """Yields a tensor's values; it is read only when the generator runs."""
    import numpy as np

    yield np.asarray(tensor).astype(dtype, copy=False)


def subtree_leaves(manifest: Manifest, only: str) -> dict[str, Any]:
    """Leaves of a manifest under the path ``only``, or all leaves."""
    return {p: leaf for p, leaf in manifest.leaves.items() if not only or p == only or p.startswith(f"{only}/")}


def distance(a: CheckpointLeaf, b: CheckpointLeaf) -> str:
    """Description of the difference of two leaves of one shape, computed some rows at a time."""
    import numpy as np

    if not a.shape:
        return f"{a.read()} and {b.read()}"
    if not np.issubdtype(a.dtype, np.number) and a.dtype.kind != "V":
        return "other values"
    rows = max(1, a.shape[0] * 2**24 // max(1, a.record.nbytes))
    squares, norm, most, different = 0.0, 0.0, 0.0, 0
    for begin in range(0, a.shape[0], rows):
        index = (slice(begin, min(begin + rows, a.shape[0])), *(slice(None) for _ in a.shape[1:]))
        raw = a.read(index), b.read(index)
        x, y = (part.astype(np.float64) for part in raw)
        difference = np.abs(x - y)
        squares, norm = squares + float((difference**2).sum()), norm + float((x**2).sum())
        most, different = max(most, float(difference.max())), different + int((difference != 0).sum())
    share = (squares / norm) ** 0.5 if norm else float("inf")
    return f"{different:,} of {int(np.prod(a.shape)):,} values, by {most:.3g} at most; |a-b|/|a| = {share:.3g}"


def checkpoint_directory(where: str) -> str:
    """Directory of checkpoints: ``where`` itself, or ``checkpoints`` in a run's directory."""
    inside = Path(where) / "checkpoints"
    return str(inside) if "://" not in where and inside.is_dir() else where


@contextmanager
def opened(where: str) -> Iterator[Checkpointer]:
    """Opens checkpoints read-only.

    Raises:
        CheckpointNotFoundError: there is no such directory.
    """
    from jaxllm.checkpoint import Checkpointer, CheckpointNotFoundError

    place = checkpoint_directory(where)
    if "://" not in place and not Path(place).is_dir():
        raise CheckpointNotFoundError(
            f"there is no directory {place}. Give a run's directory, a directory of checkpoints, or a URL."
        )
    with Checkpointer(place, read_only=True) as found:
        yield found


def size(count: int) -> str:
    """Number of bytes in MiB, for display."""
    return f"{count / 2**20:,.1f} MiB"


@contextmanager
def bar(verb: str) -> Iterator[Callable[[str, int, int], None]]:
    """Progress bar on the terminal, removed at the end; call the yielded ``progress(item, done, total)``."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(verb), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=None)
        yield lambda item, done, total: shown.update(task, description=item, completed=done, total=total)


COMMANDS: dict[str, Callable[..., int]] = {
    "ls": ls,
    "verify": verify,
    "diff": diff,
    "reshard": reshard,
    "gc": gc,
}
