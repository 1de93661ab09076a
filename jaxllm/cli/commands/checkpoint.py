"""``jaxllm checkpoint``: looking at checkpoints, checking, comparing, changing and removing them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from jaxllm.config import closest

if TYPE_CHECKING:
    from jaxllm.checkpoint import Checkpointer
    from jaxllm.checkpoint.checkpoint_reader import Leaf
    from jaxllm.checkpoint.checkpoint_writer import StreamedLeaf
    from jaxllm.checkpoint.storage.checkpoint_manifest import Manifest

Where = Annotated[str, tyro.conf.Positional]
"""A run's directory, one of checkpoints, or its URL."""


def checkpoint(argv: list[str]) -> int:
    """List, check, compare, convert, remove checkpoints: `jaxllm checkpoint COMMAND WHERE`."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: jaxllm checkpoint COMMAND WHERE ... [--setting value ...]\n\ncommands:")
        for name, function in COMMANDS.items():
            print(f"  {name:8} {(function.__doc__ or '').splitlines()[0]}")
        print("\nWHERE is a run's directory, one that holds checkpoints, or its URL (gs://, s3://, ...).")
        print("`jaxllm checkpoint COMMAND --help` explains a command.")
        return 0
    if argv[0] not in COMMANDS:
        print(f"jaxllm checkpoint: no command {argv[0]!r}.{closest(argv[0], COMMANDS)} "
              f"There are: {', '.join(COMMANDS)}.", file=sys.stderr)  # fmt: skip
        return 2
    return tyro.cli(COMMANDS[argv[0]], args=argv[1:], prog=f"jaxllm checkpoint {argv[0]}")


def ls(where: Where, /, leaves: bool = False, step: int | None = None) -> int:
    """Lists the checkpoints of a place, or the leaves of one.

    Args:
        where: a run's directory, one of checkpoints, or its URL.
        leaves: every leaf's path, shape, dtype and hash.
        step: the checkpoint whose leaves are listed; the newest by default.
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
    """Reads checkpoints and compares every byte with their hashes; the exit status is 1 where one is damaged.

    Args:
        where: a run's directory, one of checkpoints, or its URL.
        step: one checkpoint; all by default.
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
    """Compares two checkpoints leaf by leaf, by their hashes; the exit status is 1 where they differ.

    Args:
        first: a run's directory, one of checkpoints, or its URL.
        second: the other one; may be the same place.
        first_step: the newest by default.
        second_step: the newest by default.
        only: the path of a subtree, such as params.
    """
    with opened(first) as one, opened(second) as two:
        a, b = one.manifest(first_step), two.manifest(second_step)
        left, right = of_subtree(a, only), of_subtree(b, only)
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
    """Writes a checkpoint anew: a part, another dtype, single or stacked layers, other names; a piece at a time.

    For another mesh nothing has to be converted: every command reads the slices that it needs. With --only params, OUT
    is a model that generate, chat and eval open.

    Args:
        where: a run's directory, one of checkpoints, or its URL.
        out: the directory to make, or a URL.
        step: the newest by default.
        only: paths of subtrees to keep, such as params; everything by default.
        dtype: what floating-point leaves become.
        layers: single: a leaf for each layer; stacked: one for all layers of a group, as models here have them.
        names: hf: parameters by the names and in the shapes of the model's family elsewhere; jaxllm: back.
    """
    from jaxllm.checkpoint import Checkpointer, CheckpointError
    from jaxllm.checkpoint.relayout import Layout, relaid, sources_of

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
        layout = Layout(only, dtype, layers)
        leaves = relaid(found.open_leaves(manifest.step), sources_of(manifest.leaves, layout), dtype, progress)
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
    """Removes old checkpoints; never the newest one whose contents are good.

    Args:
        where: a run's directory, one of checkpoints, or its URL; no run may be saving there.
        keep_last: the newest ones that stay.
        keep_every: those whose step is a multiple stay too.
        set_aside: also remove what was set aside: damaged checkpoints, and those that a run went back from.
        dry_run: only say what would go.
    """
    from jaxllm.checkpoint import CheckpointConfig, Checkpointer

    with Checkpointer(place_of(where), CheckpointConfig(keep_last=keep_last, keep_every=keep_every)) as found:
        before = found.steps()
        gone = found.collect(set_aside=set_aside, dry=dry_run)
    verb = "would go" if dry_run else "removed"
    print(f"{verb}: {', '.join(gone) if gone else 'nothing'}; {len(before)} checkpoints before")
    return 0


def renamed(
    leaves: Mapping[str, StreamedLeaf], found: Checkpointer, step: int, meta: dict[str, Any], names: str
) -> dict[str, StreamedLeaf]:
    """Parameters by the names of the model's family elsewhere, or back from them, by the hub's tables."""
    import numpy as np

    from jaxllm.checkpoint.checkpoint_writer import StreamedLeaf
    from jaxllm.checkpoint.errors import CheckpointError
    from jaxllm.config import from_dict
    from jaxllm.hub.families.config_json import config_json
    from jaxllm.hub.families.families import family
    from jaxllm.hub.huggingface import Carried, by_leaf, match, paths, stream_leaf, their_tensors
    from jaxllm.models import DecoderConfig, functional

    if (meta.get("names") or "jaxllm") == names:
        raise CheckpointError(f"{found.directory} has these names already: {names}.")
    config = from_dict(DecoderConfig, meta["config"]["model"], "the checkpoint's model")
    source = meta.get("source") or config_json(config, meta["config"].get("data", {}).get("seq_len"), {})
    saved = found.map_leaves(step)
    some = next(iter(leaves.values())).dtype
    out: dict[str, StreamedLeaf] = {}
    if names == "hf":
        for name, tensor in their_tensors(source, config, saved, Carried()).items():
            out[f"params/{name}"] = StreamedLeaf(tuple(tensor.shape), some, made_when_asked(tensor, some))
        return out
    ours = paths(functional(config).abstract())
    wanted, _ = match(family(source).table, config, ours, saved)
    sources = by_leaf(wanted, saved)
    for path, leaf in ours.items():
        out[f"params/{path}"] = StreamedLeaf(tuple(leaf.shape), np.dtype(some), stream_leaf(sources[path], some, path))
    return out


def made_when_asked(tensor: Any, dtype: Any) -> Iterator[Any]:
    """A tensor's values, when they are asked for."""
    import numpy as np

    yield np.asarray(tensor).astype(dtype, copy=False)


def of_subtree(manifest: Manifest, only: str) -> dict[str, Any]:
    return {p: leaf for p, leaf in manifest.leaves.items() if not only or p == only or p.startswith(f"{only}/")}


def distance(a: Leaf, b: Leaf) -> str:
    """How far two leaves of one shape are apart, some rows at a time."""
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


def place_of(where: str) -> str:
    """The place of checkpoints that a run's directory, or a place itself, means."""
    inside = Path(where) / "checkpoints"
    return str(inside) if "://" not in where and inside.is_dir() else where


@contextmanager
def opened(where: str) -> Iterator[Checkpointer]:
    """A place's checkpoints, to be read.

    Raises:
        CheckpointError: there is no such directory.
    """
    from jaxllm.checkpoint import Checkpointer, CheckpointNotFoundError

    place = place_of(where)
    if "://" not in place and not Path(place).is_dir():
        raise CheckpointNotFoundError(f"there is no directory {place}. Give a run's, one of checkpoints, or a URL.")
    with Checkpointer(place, read_only=True) as found:
        yield found


def size(count: int) -> str:
    """Bytes, for people."""
    return f"{count / 2**20:,.1f} MiB"


@contextmanager
def bar(verb: str) -> Iterator[Callable[[str, int, int], None]]:
    """``progress(item, done, total)`` moves a bar on the terminal, which is gone in the end."""
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
