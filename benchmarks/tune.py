"""Tunes an operation's kernels on the device at hand: the command ``jaxllm tune OPERATION`` by its old name.

python -m benchmarks.tune flash_attention          writes pallas_kernels/tuned/KIND.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxllm.cli.main import main as jaxllm


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns an exit status."""
    return jaxllm(["tune", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
