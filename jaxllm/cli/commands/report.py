"""``jaxllm report`` and ``jaxllm compare``: HTML pages about runs, from their logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from jaxllm.cli.command_parser import parse_command


def report(argv: list[str]) -> int:
    """Report on a run as one HTML page, or as text: `jaxllm report RUN [--text]`."""

    def run(directory: Annotated[Path, tyro.conf.Positional], /, out: Path | None = None, text: bool = False) -> int:
        """Writes a page with curves, throughput, memory, time breakdown, configuration and receipt of a run.

        The run may be finished or not. The page needs no network and no script. It shows the log of process 0.

        Args:
            directory: the run's directory, such as runs/quickstart.
            out: file to write; by default report.html in the run's directory.
            text: print the results and the time breakdown instead.
        """
        from jaxllm.observe import html_report as pages
        from jaxllm.observe.run_record import read_record

        record = read_record(directory)
        if text:
            print(pages.text_report(record))
            return 0
        file = out or directory / "report.html"
        pages.write(pages.html_report(record), file)
        print(f"written: {file}")
        return 0

    return parse_command(run, argv, "jaxllm report")


def compare(argv: list[str]) -> int:
    """Compare runs on one HTML page: `jaxllm compare RUN RUN ...`."""

    def run(directories: Annotated[tuple[Path, ...], tyro.conf.Positional], /, out: Path = Path("compare.html")) -> int:
        """Writes a page with overlaid curves, results, and the settings in which the runs differ.

        Args:
            directories: directories of two or more runs.
            out: file to write.
        """
        from jaxllm.observe import html_report as pages
        from jaxllm.observe.run_record import read_record

        pages.write(pages.html_comparison([read_record(each) for each in directories]), out)
        print(f"written: {out}")
        return 0

    return parse_command(run, argv, "jaxllm compare")
