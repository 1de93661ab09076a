"""A side of a comparison: a process that does one piece of work when told to and says how long it took."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from typing import Any, NamedTuple

from benchmarks.peers.setting import Product, Setting

REPEATS = 5
"""How often a matrix product is timed; the fastest counts."""


class Start(NamedTuple):
    """First line a worker reads."""

    setting: dict[str, Any]
    threads: int
    spawned: float  # time.time() of the moment before this process was started


class Side:
    """One side of a comparison; a subclass does the work with one library."""

    def __init__(self, start: Start):
        self.setting = Setting(**start.setting)

    def about(self) -> dict[str, object]:
        """Name, versions, parameters."""
        raise NotImplementedError

    def train(self, steps: int) -> float:
        """So many optimizer steps, the last one finished when this returns; its loss."""
        raise NotImplementedError

    def decode(self, batch: int) -> int:
        """Continues a prompt for ``batch`` rows, greedily, with a cache; how many tokens were made."""
        raise NotImplementedError

    def product_seconds(self, product: Product) -> float:
        """Fastest of several runs of one matrix product."""
        raise NotImplementedError

    def compiled(self) -> dict[str, float]:
        """Programs compiled so far and the seconds that took."""
        return {"programs": 0, "seconds": 0.0}

    def peak_bytes(self) -> int:
        """Most memory that was ever in use: the process's, or the device's."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def floor(self) -> dict[str, float]:
        """Seconds of a step's matrix products alone, and the FLOP/s of the fastest."""
        timed = [(product, self.product_seconds(product)) for product in self.setting.products()]
        return {
            "floor": sum(product.count * seconds for product, seconds in timed),
            "rate": max(product.flops / seconds for product, seconds in timed),
        }


def serve(side_class: type[Side]) -> int:
    """Answers JSON lines until standard input ends; an error is the last answer."""
    start = Start(**json.loads(sys.stdin.readline()))
    try:
        side = side_class(start)
        answer(side.about())
        for line in sys.stdin:
            answer(_done(side, start, json.loads(line)))
    except Exception as error:
        traceback.print_exc()
        answer({"failed": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def _done(side: Side, start: Start, request: dict[str, Any]) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_SELF)
    clock = time.perf_counter()
    if request["do"] == "train":
        result: dict[str, Any] = {"loss": side.train(request["steps"])}
    elif request["do"] == "decode":
        result = {"tokens": side.decode(request["batch"])}
    elif request["do"] == "floor":
        result = side.floor()
    else:
        raise ValueError(f"a worker is asked to {request['do']!r}; it can train, decode and floor.")
    seconds = time.perf_counter() - clock
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        **result,
        "seconds": seconds,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "since_start": time.time() - start.spawned,
        "peak_bytes": side.peak_bytes(),
        "compiled": side.compiled(),
    }


def answer(message: dict[str, Any]) -> None:
    """One line on what was standard output before libraries could print to it."""
    _OUT.write(json.dumps(message) + "\n")
    _OUT.flush()


# Anything a library prints goes to standard error; answers keep the pipe to themselves.
_OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
