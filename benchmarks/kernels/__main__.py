"""Kernels against the roofline of the devices at hand, and against others' kernels in the same run.

    python -m benchmarks.kernels                                  all operations, shapes of real models
    python -m benchmarks.kernels --op flash_attention --torch-python ~/torch/bin/python --json figures.json
    python -m benchmarks.kernels --quick                          tiny shapes, as where there is no accelerator

Of each shape: milliseconds, TFLOP/s, GB/s and the share of the roofline, forward and backward, counted from the shape,
and the error; see ``measure``.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.kernels.measure import measure, show
from pallas_kernels import explain

OPERATIONS = {
    "flash_attention": "flash",
    "ring_attention": "ring",
    "paged_attention": "paged",
    "grouped_matmul": "grouped",
    "linear_cross_entropy": "cross_entropy",
}


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Runs the benchmark and returns its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--quick", action="store_true", help="tiny shapes; without an accelerator always")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--torch-python", help="an interpreter that has PyTorch, for its scaled_dot_product_attention")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    options = parser.parse_args(arguments)
    quick = options.quick or jax.default_backend() == "cpu"
    device = jax.devices()[0].device_kind
    print(f"{len(jax.devices())} x {device}, jax {jax.__version__}")
    rows = []
    for op in options.op:
        module = importlib.import_module(f"benchmarks.kernels.{OPERATIONS[op]}")
        extra = {"torch_python": options.torch_python} if op == "flash_attention" else {}
        print(f"\n{explain(op)}\n")
        found = []
        for name, shape in (module.TINY if quick else module.SHAPES).items():
            found += measure(name, module.work(shape, **extra), options.repeats)
        show(found)
        rows += [{"op": op, **row} for row in found]
    if options.json is not None:
        about = {"device": device, "devices": len(jax.devices()), "jax": jax.__version__}
        options.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
