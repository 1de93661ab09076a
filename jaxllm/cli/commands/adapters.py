"""``jaxllm adapters``: lists, compares, adds and merges adapters in the format of the library peft."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from jaxllm.cli.command_parser import parse_subcommands
from jaxllm.cli.errors import UsageError


def adapters(argv: list[str]) -> int:
    """List, compare, add and merge adapters: `jaxllm adapters ls|diff|add|merge`."""
    commands = {"ls": ls, "diff": diff, "add": add, "merge": merge}
    return parse_subcommands(commands, argv, "jaxllm adapters", _ABOUT)


_ABOUT = (
    "Lists, compares, adds and merges adapters: directories with adapter_config.json and adapter_model.safetensors."
)


def ls(folder: Annotated[Path, tyro.conf.Positional], /) -> int:
    """Lists the adapters in a directory, or that directory itself.

    Args:
        folder: an adapter, or a directory of adapters.
    """
    from jaxllm.peft.adapter_arithmetic import open_adapter
    from jaxllm.peft.peft_files import CONFIG

    found = [folder] if (folder / CONFIG).exists() else sorted(file.parent for file in folder.glob(f"*/{CONFIG}"))
    if not found:
        raise UsageError(f"{folder} has no adapters: no {CONFIG} in it or in its directories.")
    for path in found:
        one = open_adapter(path)
        size = f"{one.nbytes / 2**20:,.2f} MiB"
        print(f"{path}: {one.kind}, rank {one.config['r']}, {len(one.modules)} modules, {size}, base {one.base or '?'}")
    return 0


def diff(one: Annotated[Path, tyro.conf.Positional], other: Annotated[Path, tyro.conf.Positional], /) -> int:
    """Compares two adapters module by module: norm of the difference over that of the first, and cosine.

    The exit status is 1 if they differ.

    Args:
        one: an adapter.
        other: another adapter.
    """
    from jaxllm.peft.adapter_arithmetic import difference, open_adapter

    found = difference(open_adapter(one), open_adapter(other))
    for row in found:
        print(f"{row.module}: {row.relative:.4g}, cosine {row.cosine:.4f}")
    return int(any(row.relative > 0 for row in found))


def add(
    out: Annotated[Path, tyro.conf.Positional],
    summands: Annotated[tuple[str, ...], tyro.conf.Positional],
    /,
    rank: int | None = None,
) -> int:
    """Adds adapters of one base: `jaxllm adapters add OUT 0.5:ONE 0.5:OTHER --rank 16`.

    Args:
        out: directory to create.
        summands: adapters, each with its weight before a colon; 1 without one. A single one is brought to a lower rank.
        rank: rank of the sum, by singular value decomposition; by default the sum of the ranks, without an error.
    """
    from jaxllm.peft.adapter_arithmetic import add_adapters, open_adapter

    weights, paths = [], []
    for word in summands:
        weight, colon, path = word.partition(":")
        try:
            weights.append(float(weight) if colon else 1.0)
        except ValueError:
            raise UsageError(f"{word}: give WEIGHT:ADAPTER, such as 0.5:{path}.") from None
        paths.append(path if colon else word)
    if not paths:
        raise UsageError("give at least one adapter after OUT.")
    errors = add_adapters([open_adapter(path) for path in paths], weights, out, rank)
    worst = max(errors, key=lambda name: errors[name])
    print(f"{out}: {len(errors)} modules; left out by the rank: at most {errors[worst]:.2%} of the norm, in {worst}")
    return 0


def merge(
    base: Annotated[str, tyro.conf.Positional],
    adapter: Annotated[Path, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    /,
) -> int:
    """Merges an adapter into its base and writes the model in Hugging Face's format.

    Args:
        base: the model, as for `jaxllm convert`.
        adapter: an adapter of it.
        out: directory to create.
    """
    from jaxllm.convert.merge_adapter import merge_adapter

    merge_adapter(base, adapter, out)
    print(f"{out}: {base} with {adapter}")
    return 0
