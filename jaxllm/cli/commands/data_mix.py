"""``jaxllm data mix``: chooses the shares of a data mixture by small runs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from jaxllm.data import SourceConfig
    from jaxllm.plan.mixture_plan import RunProgress


def mix(
    objective: str,
    sources: tuple[str, ...],
    out: Path = Path("mixture.toml"),
    report: Path | None = None,
    method: Literal["projektor", "regression", "grid"] = "projektor",
    runs: int = 16,
    run_tokens: tuple[int, int] = (100_000, 200_000),
    size: int | None = None,
    tokenizer: str = "byte",
    seed: int = 0,
) -> int:
    """Choose the shares of a data mixture by small runs, and write a sources table for `jaxllm train --sources`.

    A stopped search resumes: finished small runs are kept in the cache.

    Args:
        objective: text that the mixture should be good for; a file, or shakespeare for its held-out part.
        sources: the sources, each NAME=PATH, for example web=web.jsonl code=code.parquet.
        out: TOML file to write: the sources with their weights.
        report: HTML page to draw: predicted loss by tokens, predicted and measured runs.
        method: projektor: optimal-transport distance to the objective, projected (arXiv:2307.02460). regression: a data
            mixing law (arXiv:2403.16952). grid: the best of the small runs.
        runs: number of mixtures to run, each with both numbers of tokens.
        run_tokens: tokens of the small runs, the smaller number first.
        size: tokens that the mixture is for; default: those of the larger small runs.
        tokenizer: byte, or the path of a tokenizer, for the small runs.
        seed: of the small runs' parameters and data.
    """
    from jaxllm.cli.runtime import use_compilation_cache
    from jaxllm.data import SourceConfig
    from jaxllm.data.selection.sources_table import write_sources
    from jaxllm.files import atomic, cache_root
    from jaxllm.plan.mixture_plan import choose_mixture, mixture_page, summary
    from jaxllm.plan.mixture_runs import MixtureRuns, open_task

    named = named_sources(sources)
    use_compilation_cache()
    task = open_task(named, SourceConfig("objective", objective), tokenizer=tokenizer)
    kept = MixtureRuns(task, cache_root("") / "mixture_runs", seed=seed)
    with run_progress(task.names) as progress:
        choice = choose_mixture(kept, method=method, count=runs, sizes=run_tokens, size=size, progress=progress)
    small, large = choice.sizes
    print(f"{len(choice.mixtures)} mixtures of {len(named)} sources, {small:,} and {large:,} tokens each; "
          f"{task.heldout.target_tokens:,} tokens of the objective")  # fmt: skip
    width = max(len(name) for name in choice.names)
    for one, share in zip(task.sources, choice.shares, strict=True):
        epochs = choice.size * share / max(1, one.documents.total)
        print(f"  {one.name:<{width}}  {share:6.2f}  {epochs:8.2f} epochs of {one.documents.total:,} tokens")
    print(summary(choice))
    if report is not None:
        with atomic(report) as file:
            file.write(mixture_page(choice).encode())
        print(report)
    shares = choice.shares.tolist()
    chosen = [
        dataclasses.replace(one, weight=share) for one, share in zip(named, shares, strict=True) if share > 0
    ]  # fmt: skip
    note = (
        f"jaxllm data mix --method {choice.method}, for {choice.size:,.0f} tokens like {objective}\n{summary(choice)}"
    )
    left_out = [one.name for one, share in zip(named, shares, strict=True) if not share]
    write_sources(out, chosen, note + (f"\nShare 0: {', '.join(left_out)}" if left_out else ""))
    print(f"{out}: for `jaxllm train RECIPE --sources {out}`")
    return 0


def named_sources(words: Sequence[str]) -> list[SourceConfig]:
    """Sources of ``NAME=PATH`` words.

    Raises:
        DataError: a word is not of that form, or a name occurs twice.
    """
    from jaxllm.data import SourceConfig
    from jaxllm.files import DataError

    found: dict[str, SourceConfig] = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not (name and equals and path):
            raise DataError(f"--sources has {word!r}; each source is NAME=PATH, for example web=web.jsonl")
        if name in found:
            raise DataError(f"--sources has two sources named {name!r}; give each a unique name")
        found[name] = SourceConfig(name, path)
    return list(found.values())


@contextmanager
def run_progress(names: Sequence[str]) -> Iterator[RunProgress]:
    """Progress of the small runs: one line on stderr for each, which replaces the last one on a terminal."""
    terminal = sys.stderr.isatty()

    def show(number: int, total: int, shares: Sequence[float], tokens: int) -> None:
        mixture = ", ".join(f"{name} {share:g}" for name, share in zip(names, shares, strict=True) if share)
        line = f"small run {number} of {total}: {tokens:,} tokens, {mixture}"
        print(f"\r\x1b[K{line}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
