"""The commands ``report`` and ``compare``: what runs have written, as pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def report(argv: list[str]) -> int:
    """Show a run as one HTML page, or as text: `jaxllm report RUN [--text]`."""

    def run(directory: Annotated[Path, tyro.conf.Positional], /, out: Path | None = None, text: bool = False) -> int:
        """Curves, speed, memory, where the time went, configuration and receipt, of a run that is over or not.

        The page needs no network and no script. Of several processes, it shows what process 0 has logged.

        Args:
            directory: the run's, such as runs/quickstart.
            out: the page; by default report.html in the run's directory.
            text: print the figures and where the time went instead.
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

    return tyro.cli(run, args=argv, prog="jaxllm report")


def compare(argv: list[str]) -> int:
    """Overlay runs on one HTML page: `jaxllm compare RUN RUN ...`."""

    def run(directories: Annotated[tuple[Path, ...], tyro.conf.Positional], /, out: Path = Path("compare.html")) -> int:
        """Their curves over one another, their figures and the settings in which they differ.

        Args:
            directories: of two runs or more.
            out: the page.
        """
        from jaxllm.observe import html_report as pages
        from jaxllm.observe.run_record import read_record

        pages.write(pages.html_comparison([read_record(each) for each in directories]), out)
        print(f"written: {out}")
        return 0

    return tyro.cli(run, args=argv, prog="jaxllm compare")
