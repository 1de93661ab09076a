"""``jaxllm reproduce``: reruns the configuration of a receipt and compares the losses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from jaxllm.cli.command_parser import parse_command
from jaxllm.cli.runtime import use_compilation_cache


def reproduce(argv: list[str]) -> int:
    """Rerun the configuration of a receipt and compare losses: `jaxllm reproduce RECEIPT`."""

    def run(receipt: Annotated[Path, tyro.conf.Positional], /, out: Path = Path("runs/reproduced")) -> int:
        """Trains the receipt's configuration from scratch and compares the final losses.

        An equal environment (commit, versions, devices, mesh) must give equal bits; otherwise losses may differ by 1%.

        Args:
            receipt: receipt.json of a finished run.
            out: directory for the new run, which must not exist there.
        """
        use_compilation_cache()
        from jaxllm.train import train as run_training
        from jaxllm.train.records.receipt import compare_receipts, read_receipt, reproduction_config

        old = read_receipt(receipt)
        config = reproduction_config(old, out)
        finished = run_training(config)
        if not finished.complete:
            return 128 + (finished.signal or 0)
        equal, text = compare_receipts(old, read_receipt(finished.directory / "receipt.json"))
        print(text)
        print("reproduced" if equal else "NOT reproduced")
        return 0 if equal else 1

    return parse_command(run, argv, "jaxllm reproduce")
