"""Searches block sizes of an operation's kernels on the device at hand, and stores the fastest.

    python -m benchmarks.tune flash_attention          writes pallas_kernels/tuned/KIND.json

The default blocks are a candidate too, and what is not faster than they are is not stored. A candidate that does not
compile, or whose values are wrong, is out.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax

from benchmarks.kernels import flash
from benchmarks.kernels.measure import measure
from pallas_kernels import tuned
from pallas_kernels.flash_attention import config

ERROR = 2e-2
"""||x - y|| / ||y|| that rounding to bfloat16 explains."""
SHAPES = {
    64: flash.Shape(2, 8192, 32, 8, 64),
    128: flash.Shape(2, 8192, 32, 8, 128),
    256: flash.Shape(1, 8192, 16, 8, 256),
}

Seconds = Callable[[Any, str], float | None]
"""(blocks, "forward" or "both") -> of a call; None for a candidate that is out."""


@dataclass(frozen=True)
class Search:
    """One tuning search: the default blocks, and the fields to vary together."""

    case: str
    default: Any
    fields: tuple[tuple[str, Mapping[str, Sequence[int]]], ...]
    seconds: Seconds


def best(search: Search) -> dict[str, int]:
    """The fields in which the fastest blocks differ from the default ones."""
    blocks = search.default
    for part, fields in search.fields:
        fastest, least = blocks, search.seconds(blocks, part)
        for values in itertools.product(*fields.values()):
            candidate = dataclasses.replace(blocks, **dict(zip(fields, values, strict=True)))
            took = None if candidate == blocks else search.seconds(candidate, part)
            if took is not None:
                print(
                    f"{search.case}, {part}: {took * 1e3:.3f} ms {dict(zip(fields, values, strict=True))}", flush=True
                )
            if took is not None and (least is None or took < least):
                fastest, least = candidate, took
        blocks = fastest
    before, after = dataclasses.asdict(search.default), dataclasses.asdict(blocks)
    return {name: after[name] for name in after if after[name] != before[name]}


def flash_attention(platform: str, kind: str) -> Iterable[Search]:
    """On a TPU both passes have the same blocks; on a GPU each has its own, for head dims apart."""
    sizes = (32, 64, 128, 256)
    for head_dim, shape in SHAPES.items():
        if platform == "gpu":
            forward = {"q": sizes[1:], "kv": sizes[:3], "warps": (4, 8), "stages": (2, 3)}
            backward = {"q_back": sizes[:3], "kv_back": sizes[:3], "warps_back": (4, 8)}
            fields: tuple[tuple[str, Mapping[str, Sequence[int]]], ...] = (("forward", forward), ("both", backward))
            case, default = config.gpu_case(head_dim, 2), config.gpu_blocks(kind, head_dim, 2)
        elif head_dim == 128:
            fields = (("both", {"rows": (512, 1024, 2048, 4096), "kv": (256, 512, 1024, 2048)}),)
            case, default = config.tpu_case(2), config.tpu_blocks(kind, 2)
        else:
            continue
        yield Search(case, default, fields, _seconds(flash.work(shape), f"pallas_{platform}", f"{platform}_blocks"))


def _seconds(work: Any, name: str, function: str) -> Seconds:
    alone = dataclasses.replace(work, contenders={name: work.contenders[name]}, elsewhere={})

    def seconds(blocks: Any, part: str) -> float | None:
        with mock.patch.object(config, function, return_value=blocks):
            [row] = measure(name, alone, 10)
        if "failed" in row or not row["error"] <= ERROR:
            return None
        return row["forward_seconds"] + (row["backward_seconds"] if part == "both" else 0.0)

    return seconds


OPERATIONS: dict[str, Callable[[str, str], Iterable[Search]]] = {"flash_attention": flash_attention}


def store(operation: str, kind: str, blocks: Mapping[str, Mapping[str, int]]) -> None:
    """Writes what was found for an operation beside what is known of others."""
    file = tuned.path(kind)
    data = tuned.read(file) if file.exists() else {"device_kind": kind, "operations": {}}
    command = f"python -m benchmarks.tune {operation}  # jax {jax.__version__}"
    found = {"command": command, "blocks": {case: dict(fields) for case, fields in blocks.items()}}
    file.write_text(json.dumps(data | {"operations": data["operations"] | {operation: found}}, indent=1) + "\n")
    tuned.read.cache_clear()


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns an exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operation", choices=OPERATIONS)
    operation = parser.parse_args(arguments).operation
    platform, kind = jax.default_backend(), jax.devices()[0].device_kind
    if platform not in ("tpu", "gpu"):
        print(f"nothing to tune: kernels with block sizes run on TPUs and GPUs, and this is {kind}.", file=sys.stderr)
        return 1
    found = {search.case: best(search) for search in OPERATIONS[operation](platform, kind)}
    store(operation, kind, {case: fields for case, fields in found.items() if fields})
    print(tuned.path(kind))
    return 0


if __name__ == "__main__":
    sys.exit(main())
