"""Output head and sampler of a decode step: cycles and memory as compiled for a TPU, or time on this machine.

    python -m benchmarks.serving.sampler [--on v6e:1x1 | --here] [--rows 1,16,256] [--vocab 128256] [--width 4096]

Every row samples at temperature 1. "head" is the matmul alone, with its largest logit of each row; temporaries are in
float32 copies of the logits.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any


def _programs(rows: int, vocab: int, width: int) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Functions of hidden states and matrix, without and with the sampler, with the shapes of their arguments."""
    import jax
    import jax.numpy as jnp

    from jaxllm.infer.runner.sampler import SamplerRows, sample

    def logits(x: Any, weight: Any) -> Any:
        return (x @ weight).astype(jnp.float32)

    def head(x: Any, weight: Any) -> Any:
        return logits(x, weight).max(axis=1)

    def sampled(x: Any, weight: Any, seeds: Any, positions: Any, temperature: Any) -> Any:
        return sample(logits(x, weight), SamplerRows(seeds, positions, temperature))

    operands = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16), jax.ShapeDtypeStruct((width, vocab), jnp.bfloat16)
    each = tuple(jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.uint32, jnp.int32, jnp.float32))
    return {"head": (head, operands), "sampled": (sampled, (*operands, *each))}


def compile_here(topology: Any, rows: int, vocab: int, width: int) -> dict[str, Any]:
    """(cycles, bytes of temporaries) of each program, in a process that is set up for the topology's compiler."""
    import jax

    from jaxllm.compiler import aot
    from sharding import MeshSpec

    mesh = MeshSpec.parse("data=1").build(topology.devices()[:1])
    place = jax.NamedSharding(mesh, jax.P())
    out = {}
    for name, (fn, shapes) in _programs(rows, vocab, width).items():
        arguments = [jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=place) for one in shapes]
        report = aot.compile(jax.jit(fn), *arguments, topology=topology, mesh=mesh)
        out[name] = report.cycles, report.temp_bytes
    return out


def seconds_here(rows: int, vocab: int, width: int, rounds: int) -> dict[str, float]:
    """Median seconds of each program on this machine, in turns."""
    import jax
    import jax.numpy as jnp

    runs, spent = {}, {}
    for name, (fn, shapes) in _programs(rows, vocab, width).items():
        arguments = [jnp.ones(one.shape, one.dtype) for one in shapes]
        arguments[0] = jax.random.normal(jax.random.key(0), shapes[0].shape, shapes[0].dtype)
        runs[name], spent[name] = (jax.jit(fn), arguments), []
        runs[name][0](*arguments).block_until_ready()
    for _ in range(rounds):
        for name, (fn, arguments) in runs.items():
            began = time.perf_counter()
            fn(*arguments).block_until_ready()
            spent[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in spent.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.sampler", description=__doc__)
    parser.add_argument("--on", default="v6e:1x1", help="TPU topology of one device to compile for")
    parser.add_argument("--here", action="store_true", help="time it on this machine instead")
    parser.add_argument("--rows", default="1,16,256")
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(argv)
    from sharding.isolate import run_isolated

    print(f"vocabulary of {args.vocab:,}, {args.width:,} wide, {'here' if args.here else args.on}")
    for rows in map(int, args.rows.split(",")):
        if args.here:
            times = seconds_here(rows, args.vocab, args.width, args.rounds)
            more = times["sampled"] - times["head"]
            print(f"{rows:5} rows: head {1e3 * times['head']:.2f} ms, sampler {1e3 * more:.2f} ms", flush=True)
            continue
        sizes = {"rows": rows, "vocab": args.vocab, "width": args.width}
        found = run_isolated("benchmarks.serving.sampler:compile_here", args.on, sizes)
        (head, _), (sampled, temporary) = found["head"], found["sampled"]
        copies = temporary / (4 * rows * args.vocab)
        print(
            f"{rows:5} rows: head {head / 1e3:,.0f} thousand cycles, sampler {(sampled - head) / 1e3:,.0f}; "
            f"temporaries {copies:.2f} copies of the logits",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
