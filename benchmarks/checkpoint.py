"""Checkpoint cost: how long a save blocks training, and how fast the bytes get to disk.

    python -m benchmarks.checkpoint [--mib 1024] [--rounds 5] [--step-seconds 1.0]

A state of that size (parameters and two moments, float32) on this machine's devices, side by side in turns:

- plain write: the same bytes by write() from one buffer into one file, then fsync;
- hash: SHA-256 of the same bytes by one thread and by one for each core, nothing written; both: beside a plain write;
- blocking: ``saving="blocking"``, until the checkpoint is committed;
- eager, lazy: how long ``save`` keeps its caller, and until the checkpoint is committed;
- orbax: its own PyTreeCheckpointer (default format: OCDBT, compressed) and AsyncCheckpointer's time to return.

Each way begins with the disk's space and the page cache's pages of the one before given back, each round with another.

Then steps that donate the state, each of about --step-seconds, run with and without a lazy save in their middle: what a
save adds to the steps beside it, device and disk time shared.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.checkpoint import CheckpointConfig, Checkpointer
from jaxllm.checkpoint.storage import leaf_hashing

LEAVES = 8


def state_of(mib: int) -> dict[str, Any]:
    """Random numbers, made on the device."""
    rows = mib * 2**20 // (3 * LEAVES * 4 * 1024)
    keys = iter(jax.random.split(jax.random.key(0), 3 * LEAVES))
    make = jax.jit(lambda key: jax.random.normal(key, (rows, 1024), jnp.float32))
    return {part: {str(n): make(next(keys)) for n in range(LEAVES)} for part in ("params", "mu", "nu")}


def timed(work: Callable[[], Any]) -> float:
    """Seconds that ``work`` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def plain_write(buffer: np.ndarray, file: Path) -> None:
    """Writes a buffer to a file and syncs it, the fastest that the disk can be."""
    with open(file, "wb", buffering=0) as out:
        view = buffer.data
        while view:
            view = view[out.write(view) :]
        os.fsync(out.fileno())


def hashed(buffer: np.ndarray, threads: int) -> None:
    """Hashes a buffer in threads, in the blocks of a manifest."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(leaf_hashing.hash_bytes, leaf_hashing.split_pieces(buffer, leaf_hashing.BLOCK_BYTES)))


def both(buffer: np.ndarray, file: Path) -> None:
    """Writes and hashes a buffer at the same time."""
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(plain_write, buffer, file)
        hashed(buffer, 1)
        writing.result()


def ours(saving: Any, folder: Path, state: Any) -> tuple[float, float]:
    """(seconds that the caller is blocked, seconds until it is committed)."""
    with Checkpointer(folder, CheckpointConfig(saving=saving, keep_last=1)) as checkpointer:
        began = time.perf_counter()
        checkpointer.save(1, state, {})
        blocked = time.perf_counter() - began
        checkpointer.wait()
        return blocked, time.perf_counter() - began


def orbax(folder: Path, state: Any) -> tuple[float, float]:
    """Seconds of a save and of a restore by Orbax itself."""
    import orbax.checkpoint as ocp

    whole = timed(lambda: ocp.PyTreeCheckpointer().save(folder, state))
    return whole, whole


def orbax_async(folder: Path, state: Any) -> tuple[float, float]:
    """Seconds that Orbax's asynchronous save blocks, and seconds until it is on disk."""
    import orbax.checkpoint as ocp

    began = time.perf_counter()
    with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(state))
        blocked = time.perf_counter() - began
        checkpointer.wait_until_finished()
        return blocked, time.perf_counter() - began


def in_turns(state: Any, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(blocked, done) of every way, round by round; the first round warms up and does not count."""
    buffer = np.concatenate([np.asarray(leaf).reshape(-1).view(np.uint8) for leaf in jax.tree.leaves(state)])
    cores = os.cpu_count() or 1

    def simply(work: Callable[[Path], None]) -> Callable[[Path], tuple[float, float]]:
        return lambda place: (seconds := timed(lambda: work(place)), seconds)

    ways: dict[str, Callable[[Path], tuple[float, float]]] = {
        "plain write": simply(lambda place: plain_write(buffer, place)),
        "hash, 1": simply(lambda _: hashed(buffer, 1)),
        f"hash, {cores}": simply(lambda _: hashed(buffer, cores)),
        "both": simply(lambda place: both(buffer, place)),
        **{saving: functools.partial(ours, saving, state=state) for saving in ("blocking", "eager", "lazy")},
        "orbax": functools.partial(orbax, state=state),
        "orbax async": functools.partial(orbax_async, state=state),
    }
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        turn = number % len(ways)
        for way in [*ways][turn:] + [*ways][:turn]:
            with tempfile.TemporaryDirectory() as name:
                pair = ways[way](Path(name) / "place")
            if number:
                found[way].append(pair)
    return found


def beside_steps(state: Any, step_seconds: float) -> dict[str, float]:
    """Seconds of eight steps that donate the state, without a save and with one of each kind at the third."""
    weight = jnp.ones((1024, 1024)) / 1024

    def program(tree: Any, count: int) -> Any:
        busy = jax.lax.fori_loop(0, count, lambda _, x: jnp.tanh(x @ weight), weight)
        return jax.tree.map(lambda x: x + 1e-9 * busy[0, 0], tree)

    step = jax.jit(program, donate_argnums=0)
    count = jnp.int32(1)
    tree = step(jax.tree.map(jnp.copy, state), count)
    jax.block_until_ready(tree)
    while (
        took := timed(lambda count=count: jax.block_until_ready(step(jax.tree.map(jnp.copy, state), count)))
    ) < step_seconds:
        count = jnp.int32(int(count) * max(2, min(16, int(step_seconds / took))))
    out = {}
    for saving in ("none", "lazy", "eager", "blocking", "none again"):
        tree = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        config = CheckpointConfig(saving=saving if not saving.startswith("none") else "lazy", keep_last=1)  # type: ignore[arg-type]
        with tempfile.TemporaryDirectory() as folder, Checkpointer(folder, config) as checkpointer:
            began = time.perf_counter()
            for number in range(8):
                tree = step(tree, count)
                if number == 2 and not saving.startswith("none"):
                    checkpointer.save(number, tree, {})
            jax.block_until_ready(tree)
            out[saving] = time.perf_counter() - began
    return out


def main() -> None:
    """Entry point of ``python -m benchmarks.checkpoint``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-seconds", type=float, default=1.0, help="0: without them")
    options = parser.parse_args()
    state = jax.block_until_ready(state_of(options.mib))
    mib = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 2**20
    print(
        f"{mib:.0f} MiB on {jax.devices()[0].device_kind}, {os.cpu_count()} cores; medians of {options.rounds} rounds"
    )
    before = os.getloadavg()[0]
    turns = in_turns(state, options.rounds)
    print(f"  load before {before:.1f}, after {os.getloadavg()[0]:.1f}")
    median = {way: [statistics.median(one[i] for one in pairs) for i in (0, 1)] for way, pairs in turns.items()}
    plain, blocking = median["plain write"][1], median["blocking"][0]
    for way, (blocked, done) in median.items():
        print(f"  {way:12} blocked {blocked * 1e3:8.1f} ms ({blocked / blocking:6.1%} of blocking), "
              f"on disk after {done:6.2f} s: {mib / done:6.0f} MiB/s, {plain / done:5.2f} x plain")  # fmt: skip
    steps = beside_steps(state, options.step_seconds) if options.step_seconds else {}
    for way, seconds in steps.items():
        print(f"  eight steps, save: {way:10} {seconds:6.2f} s")
    print(json.dumps({"mib": mib, "median": median, "steps": steps, "rounds": turns}))


if __name__ == "__main__":
    main()
