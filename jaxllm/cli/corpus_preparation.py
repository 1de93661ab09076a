"""Command ``jaxllm data prepare``: runs the tasks of a corpus and prints what was kept and dropped."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from jaxllm.cli.errors import UsageError
from jaxllm.data.prepare.corpus_config import read_corpus_config
from jaxllm.data.prepare.executors import check_executor, run_part, submit_slurm, write_slurm
from jaxllm.data.prepare.preparation import (
    PreparedCorpus,
    finish_corpus,
    finished,
    plan_corpus,
    prepare_corpus,
    work_folder,
)


def prepare_from_file(file: Path, on: str, workers: int, part: str) -> int:
    """Prepares the corpus of a TOML file on an executor, or runs one part of a stage; returns the exit status."""
    try:
        check_executor(on, workers)
    except ValueError as error:
        raise UsageError(str(error)) from None
    config = read_corpus_config(file)
    if part:
        if part == "finish":  # the last job
            print_corpus(finish_corpus(work_folder(config)))
        else:
            run_part(work_folder(config), part)
        return 0
    if on != "slurm":
        with_bar = sys.stderr.isatty()

        def progress(stage: str, done: int, total: int) -> None:
            if with_bar or done == total:
                print(f"\r{stage}: {done:,} of {total:,} tasks", end="" if done < total else "\n", file=sys.stderr)

        print_corpus(prepare_corpus(config, on=on, workers=workers, progress=progress))
        return 0
    if (done := finished(config)) is not None:
        print_corpus(done)
        return 0
    script = write_slurm(plan_corpus(config), file, workers)
    printed = submit_slurm(script)
    print(f"{script}: submits an array of {workers} for each stage" if printed is None else printed.rstrip())
    if printed is None:
        print("this machine has no sbatch; run the script where there is, with sbatch's options after it")
    return 0


def print_corpus(corpus: PreparedCorpus) -> None:
    """Prints the documents kept and dropped of each source, and where the corpus is."""
    for one in corpus.manifest["sources"]:
        share = one["kept"] / max(1, one["read"])
        print(f"{one['name']}: {one['kept']:,} of {one['read']:,} documents ({share:.1%}), {one['tokens']:,} tokens")
        for rule, count in sorted(one["dropped"].items(), key=lambda item: (-item[1], item[0])):
            print(f"  {rule:32} {count:,}")
    folder = os.path.relpath(corpus.path.parent)
    print(f"{folder}/manifest.json: {len(corpus.manifest['shards']):,} shards, for data.source; samples of dropped "
          f"documents: {folder}/report.html")  # fmt: skip
