"""Possible gain of kernels for small operations: the TPU compiler's own cycle estimates of XLA's programs.

``python -m tests.kernels.rms_norm_cycles v5e`` prints, for each operation at the sizes of Llama-3.1-8B, the estimated
cycles of XLA's program and of one that only moves the same bytes, of which no kernel can move fewer; then of products
with and without the small operations beside them; and what eight layers keep for the backward pass.

Legend: T tokens, D embed, F mlp, N query heads, K kv heads, H head dim, L layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.rms_norm import rms_norm
from sharding.isolate import run_isolated
from sharding.topology import Topology

T, D, F, N, K, H = 8192, 4096, 14336, 32, 8, 128
SHAPES = {"v4": "v4:2x2x1", "v5e": "v5e:1x1", "v5p": "v5p:2x2x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:2x2x1"}


def norm(x: Any, gain: Any) -> Any:
    h = x.astype(jnp.float32)
    h = h * jax.lax.rsqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True) + 1e-5)
    return (h * gain.astype(jnp.float32)).astype(x.dtype)


def residual_norm(x: Any, y: Any, gain: Any) -> Any:
    return x + y, norm(x + y, gain)


def rope(x: Any, cos: Any, sin: Any) -> Any:
    a, b = (part.astype(jnp.float32) for part in jnp.split(x, 2, axis=-1))
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)], axis=-1)


def rope_rolled(x: Any, cos: Any, sin: Any) -> Any:
    cos, sin = jnp.concatenate([cos, cos], -1)[:, None], jnp.concatenate([-sin, sin], -1)[:, None]
    h = x.astype(jnp.float32)
    return (h * cos + jnp.roll(h, x.shape[-1] // 2, axis=-1) * sin).astype(x.dtype)


def gated(gate: Any, up: Any) -> Any:
    return jax.nn.silu(gate) * up


def backward(function: Callable[..., Any], arguments: int) -> Callable[..., Any]:
    def run(*xs: Any) -> Any:
        _, pull = jax.vjp(function, *xs[:arguments])
        results = xs[arguments:]
        return pull(results[0] if len(results) == 1 else results)

    return run


def move(reads: int, writes: int) -> Callable[..., Any]:
    """Reads so many arrays and writes so many, each made of all of them."""
    return lambda *xs: tuple(sum(xs) * (i + 2) for i in range(writes)) if reads == len(xs) else None


X, G, W = (T, D), (D,), (T, F)
OPERATIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], tuple[int, ...], int, int]] = {
    "rms_norm": (norm, [X, G], X, 1, 1),
    "rms_norm, backward": (backward(norm, 2), [X, G, X], X, 2, 1),
    "residual + rms_norm": (residual_norm, [X, X, G], X, 2, 2),
    "residual + rms_norm, backward": (backward(residual_norm, 3), [X, X, G, X, X], X, 4, 2),
    "rope of q": (rope, [(T, N, H), (T, H // 2), (T, H // 2)], (T, N * H), 1, 1),
    "rope of q, as a roll": (rope_rolled, [(T, N, H), (T, H // 2), (T, H // 2)], (T, N * H), 1, 1),
    "silu(gate) * up": (gated, [W, W], W, 2, 1),
    "silu(gate) * up, backward": (backward(gated, 2), [W, W, W], W, 3, 2),
}
"""Name -> (program, shapes of its arguments, shape of what the yardstick moves, arrays it reads, arrays it writes)."""


def block(small: bool) -> Callable[..., Any]:
    """A feed-forward layer of a residual block; without its small operations, the matmuls alone."""

    def run(x: Any, gain: Any, w_gate: Any, w_up: Any, w_down: Any) -> Any:
        h = norm(x, gain) if small else x
        gate, up = h @ w_gate, h @ w_up
        return (x if small else 0) + (gated(gate, up) if small else gate - 0.5 * up) @ w_down

    return run


def query(small: bool) -> Callable[..., Any]:
    """The projection of queries, rotated or not."""

    def run(x: Any, w: Any, cos: Any, sin: Any) -> Any:
        q = (x @ w).reshape(-1, N, H)
        return rope(q, cos, sin) if small else q

    return run


def kept(topology: Topology, implementation: str) -> tuple[int, int]:
    """(bytes of temporaries, cycles) of the gradient of eight layers that are not recomputed."""
    from jaxllm.compiler import aot

    tokens, d, f, layers = 2048, 2048, 5632, 8
    mesh = jax.make_mesh((topology.num_devices,), ("data",), devices=topology.devices())

    def layer(x: Any, weights: Any) -> Any:
        gain, w_gate, w_up, w_down = weights
        h = rms_norm(x, gain, eps=1e-5, implementation=implementation)
        return x + gated(h @ w_gate, h @ w_up) @ w_down, None

    def loss(weights: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2)

    shapes = (layers, d), (layers, d, f), (layers, d, f), (layers, f, d), (tokens, d)
    *weights, x = (jax.ShapeDtypeStruct(s, "bfloat16", sharding=NamedSharding(mesh, P())) for s in shapes)
    report = aot.compile(jax.jit(jax.grad(loss)), tuple(weights), x, topology=topology, mesh=mesh)
    return report.temp_bytes, report.cycles


def measure(topology: Topology) -> dict[str, Any]:
    """In a child process: cycles by name."""
    from jaxllm.compiler import aot

    n = topology.num_devices
    mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Explicit,), devices=topology.devices())

    def cycles(function: Callable[..., Any], shapes: list[tuple[int, ...]]) -> int:
        arguments = [
            jax.ShapeDtypeStruct((s[0] * n, *s[1:]), "bfloat16", sharding=NamedSharding(mesh, P("data")))
            for s in shapes
        ]
        local = jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return aot.compile(jax.jit(local), *arguments, topology=topology, mesh=mesh).cycles

    found = {}
    for name, (function, shapes, moved, reads, writes) in OPERATIONS.items():
        found[name] = cycles(function, shapes), cycles(move(reads, writes), [moved] * reads)
    shapes = [X, G, (D, F), (D, F), (F, D)]
    for name, turn, more in (("block", lambda f: f, []), ("block, backward", lambda f: backward(f, 5), [X])):
        found[name] = tuple(cycles(turn(block(small)), [*shapes, *more]) for small in (True, False))
    shapes = [X, (D, N * H), (T, H // 2), (T, H // 2)]
    found["q = x w, and rope"] = tuple(cycles(query(small), shapes) for small in (True, False))
    return {"cycles": found, "kept": {name: kept(topology, name) for name in ("reference", "xla")}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("generation", choices=SHAPES)
    generation = parser.parse_args().generation
    print("| operation | XLA, k cycles | least, k cycles | XLA / least |\n| --- | --- | --- | --- |")
    measured = run_isolated("tests.kernels.rms_norm_cycles:measure", SHAPES[generation], {})
    for name, (ours, least) in measured["cycles"].items():
        print(f"| {name} | {ours / 1e3:.0f} | {least / 1e3:.0f} | {ours / least:.2f} |")
    for name, (temporaries, cycles) in measured["kept"].items():
        print(f"rms_norm {name}: {temporaries / 2**20:.0f} MiB of temporaries, {cycles / 1e3:.0f} k cycles")


if __name__ == "__main__":
    main()
