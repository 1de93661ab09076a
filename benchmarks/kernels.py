"""Kernels against the roofline of the device at hand, and against others' kernels in the same run.

    python -m benchmarks.kernels --op flash_attention
    python -m benchmarks.kernels --op flash_attention --torch-python ~/torch/bin/python --json figures.json

Of each shape: milliseconds, TFLOP/s, and the share of the roofline, forward and backward. FLOPs and bytes are counted
from the shape; work that the mask excludes does not count, and the backward pass counts five products, as in
arXiv:2307.08691. The roofline is the larger of FLOPs by peak and bytes by bandwidth; a device whose figures are not
known is measured with a large product and a large copy. Errors are ||x - y|| / ||y|| against plain JAX in float32.

Legend: B batch, S sequence, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import explain
from pallas_kernels.flash_attention import flash_attention

Arrays = tuple[jax.Array, ...]
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

PEAKS = {  # bf16 TFLOP/s and GB/s of one jax device, by the makers' data sheets
    "TPU v4": (275, 1228),
    "TPU v5 lite": (197, 819),
    "TPU v5": (459, 2765),
    "TPU v6 lite": (918, 1640),
    "TPU7x": (1153.5, 3690),
    "NVIDIA H100": (989.4, 3352),
    "NVIDIA H200": (989.4, 4800),
    "NVIDIA B200": (2250, 7672),
}


@dataclass(frozen=True)
class Shape:
    """Causal self-attention of ``b`` rows of ``s`` tokens."""

    b: int
    s: int
    n: int
    k: int
    h: int
    window: int | None = None
    dtype: str = "bfloat16"

    @property
    def pairs(self) -> int:
        """Of a query and a key that it sees, in one row and head."""
        seen = min(self.window or self.s, self.s)
        return seen * (seen + 1) // 2 + (self.s - seen) * seen

    def flops(self, *, backward: bool) -> int:
        """Two products forward, five backward."""
        return (5 if backward else 2) * 2 * self.b * self.n * self.pairs * self.h

    def bytes(self, *, backward: bool) -> int:
        """Each array once: q, k, v, out and logsumexp; backward with gradients, the logsumexp and delta."""
        item = jnp.dtype(self.dtype).itemsize
        queries, keys = self.b * self.s * self.n, self.b * self.s * self.k
        if backward:  # reads q, k, v, out, d_out; writes d_q, d_k, d_v
            return item * self.h * (4 * queries + 4 * keys) + 2 * 4 * queries
        return item * self.h * (2 * queries + 2 * keys) + 4 * queries


SHAPES = {
    "Llama-3.1-8B, 4k": Shape(4, 4096, 32, 8, 128),
    "Llama-3.1-8B, 8k": Shape(2, 8192, 32, 8, 128),
    "Llama-3.1-8B, 32k": Shape(1, 32768, 32, 8, 128),
    "gpt-oss-20b, 8k, window 128": Shape(1, 8192, 64, 8, 64, window=128),
    "Gemma-2-9B, 8k, window 4096": Shape(1, 8192, 16, 8, 256, window=4096),
}
TINY = {"tiny": Shape(1, 48, 4, 2, 16, dtype="float32"), "tiny, window": Shape(1, 48, 4, 2, 16, 10, "float32")}
"""What runs where there is no accelerator."""


def peaks() -> tuple[float, float]:
    """FLOP/s and bytes/s of the device: known, or measured."""
    kind = jax.devices()[0].device_kind
    if known := [name for name in PEAKS if kind.startswith(name)]:
        flops, bandwidth = PEAKS[max(known, key=len)]
        return flops * 1e12, bandwidth * 1e9
    x, y = jnp.ones((1024, 1024), jnp.float32), jnp.ones(2**24, jnp.float32)
    product = 2 * 1024**3 / seconds(jax.jit(lambda x: x @ x), (x,), 3)
    return product, 2 * y.nbytes / seconds(jax.jit(lambda y: y + 1), (y,), 3)


def seconds(function: Callable[..., Any], arguments: Sequence[Any], repeats: int) -> float:
    """Of one call: the fastest of three rounds of ``repeats`` calls that the device gets one after the other."""
    jax.block_until_ready(function(*arguments))
    rounds = []
    for _ in range(3):
        started = time.perf_counter()
        result = None
        for _ in range(repeats):
            result = function(*arguments)
        jax.block_until_ready(result)
        rounds.append((time.perf_counter() - started) / repeats)
    return min(rounds)


def contenders(shape: Shape) -> dict[str, Attention]:
    """Ours by name, and what jax brings along, as far as they are made for this platform."""
    platform = jax.default_backend()
    ours = ["xla", {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}.get(platform)]
    found: dict[str, Attention] = {
        name: functools.partial(flash_attention, window=shape.window, implementation=name) for name in ours if name
    }
    local = None if shape.window is None else (shape.window - 1, 0)
    for name in ("xla", "cudnn") if platform == "gpu" else ("xla",):
        found[f"jax.nn {name}"] = functools.partial(
            jax.nn.dot_product_attention, is_causal=True, local_window_size=local, implementation=name
        )
    if shape.window is None and platform == "tpu":
        found["jax pallas tpu"] = _jax_tpu
    if shape.window is None and platform == "gpu":
        found["jax pallas gpu"] = _jax_gpu
    return found


def _jax_tpu(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import flash_attention as theirs

    q, k, v = (x.swapaxes(1, 2) for x in (q, *_repeat(q, k, v)))
    return theirs.flash_attention(q, k, v, causal=True, sm_scale=q.shape[-1] ** -0.5).swapaxes(1, 2)


def _jax_gpu(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import attention as theirs

    return theirs.mha(q, *_repeat(q, k, v), None, sm_scale=q.shape[-1] ** -0.5, causal=True)


def _repeat(q: jax.Array, k: jax.Array, v: jax.Array) -> Iterable[jax.Array]:
    return (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))


def passes(attention: Attention) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(forward, forward and backward), compiled."""

    def both(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
        out, pull = jax.vjp(attention, q, k, v)
        return out, *pull(d_out)

    return jax.jit(attention), jax.jit(both)


def difference(got: Iterable[Any], want: Iterable[Any]) -> float:
    """The largest ||x - y|| / ||y||."""
    pairs = ((np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in zip(got, want, strict=True))
    return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs)


_TORCH = """
import json, sys, time, numpy as np, torch
r = json.load(sys.stdin)
on = "cuda" if torch.cuda.is_available() else "cpu"
data = np.load(r["inputs"])
q, k, v, d = (torch.tensor(data[n]).to(on, getattr(torch, r["dtype"])).transpose(1, 2) for n in ("q", "k", "v", "d"))
for x in (q, k, v): x.requires_grad_()
def forward(): return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
def both():
    out = forward()
    return (out, *torch.autograd.grad(out, (q, k, v), d))
def wait(): on == "cuda" and torch.cuda.synchronize()
def seconds(f):
    f(); wait(); rounds = []
    for _ in range(3):
        t = time.perf_counter()
        for _ in range(r["repeats"]): f()
        wait(); rounds.append((time.perf_counter() - t) / r["repeats"])
    return min(rounds)
with torch.no_grad(): one = seconds(forward)
two = seconds(both)
np.savez(r["results"], *(x.detach().float().transpose(1, 2).cpu().numpy() for x in both()))
print(json.dumps({"forward": one, "both": two, "on": on, "version": torch.__version__}))
"""


def torch_sdpa(python: str, shape: Shape, inputs: Arrays, repeats: int) -> tuple[float, float, list[np.ndarray], str]:
    """PyTorch's scaled_dot_product_attention in another interpreter: seconds of both passes, results, where it ran."""
    with tempfile.TemporaryDirectory() as folder:
        request = {"inputs": f"{folder}/in.npz", "results": f"{folder}/out.npz", "repeats": repeats}
        arrays = dict(zip("qkvd", (np.asarray(x, np.float32) for x in inputs), strict=True))
        np.savez(request["inputs"], **arrays)
        text = json.dumps(request | {"dtype": shape.dtype})
        done = subprocess.run([python, "-c", _TORCH], input=text, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        answer = json.loads(done.stdout.splitlines()[-1])
        results = np.load(request["results"])
        return answer["forward"], answer["both"], [results[x] for x in results.files], answer["on"]


def measure(name: str, shape: Shape, repeats: int, torch_python: str | None) -> list[dict[str, Any]]:
    """A row for each contender; one that fails says why."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (shape.n, shape.k, shape.k, shape.n)
    inputs = tuple(
        jax.random.normal(key, (shape.b, shape.s, n, shape.h), shape.dtype) for key, n in zip(keys, heads, strict=True)
    )
    truth = passes(functools.partial(flash_attention, window=shape.window, implementation="xla"))[1]
    with jax.default_matmul_precision("highest"):
        want = jax.device_get(truth(*(x.astype(jnp.float32) for x in inputs)))

    def run(attention: Attention) -> tuple[float, float, Any, str]:
        forward, both = passes(attention)
        results = jax.device_get(both(*inputs))
        return seconds(forward, inputs[:3], repeats), seconds(both, inputs, repeats), results, jax.default_backend()

    runs: dict[str, Callable[[], Any]] = {n: functools.partial(run, f) for n, f in contenders(shape).items()}
    if torch_python is not None and shape.window is None:
        runs["torch sdpa"] = functools.partial(torch_sdpa, torch_python, shape, inputs, repeats)
    peak, bandwidth = peaks()
    rows = []
    for contender, call in runs.items():
        row: dict[str, Any] = {"shape": name, "contender": contender, **dataclasses.asdict(shape)}
        try:
            one, two, results, where = call()
        except Exception as refusal:  # others' kernels fail in many ways: the table says which
            rows.append(row | {"failed": f"{type(refusal).__name__}: {str(refusal).splitlines()[0][:120]}"})
            continue
        row |= {"on": where, "error": difference(results, want)}
        for part, took, backward in (("forward", one, False), ("backward", max(two - one, 1e-9), True)):
            flops, size = shape.flops(backward=backward), shape.bytes(backward=backward)
            row[f"{part}_seconds"], row[f"{part}_flops"], row[f"{part}_bytes"] = took, flops, size
            row[f"{part}_roofline"] = max(flops / peak, size / bandwidth) / took
        rows.append(row)
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints a table."""
    titles = "".join(f"{part + ' ms':>14}{'TFLOP/s':>10}{'roofline':>10}" for part in ("forward", "backward"))
    print(f"{'shape':<30}{'who':<18}{titles}{'error':>10}")
    for row in rows:
        line = f"{row['shape']:<30}{row['contender']:<18}"
        if "failed" in row:
            print(line + row["failed"])
            continue
        for part in ("forward", "backward"):
            took = row[f"{part}_seconds"]
            line += f"{took * 1e3:14.3f}{row[f'{part}_flops'] / took / 1e12:10.2f}{row[f'{part}_roofline']:10.1%}"
        print(f"{line}{row['error']:10.1e}")


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Runs the benchmark and returns its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=["flash_attention"], default="flash_attention")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, *TINY], help="default: all that suit the device")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--torch-python", help="an interpreter that has PyTorch, for its scaled_dot_product_attention")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    options = parser.parse_args(arguments)
    suited = TINY if jax.default_backend() == "cpu" else SHAPES
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}\n{explain(options.op)}\n")
    rows = []
    for name in options.shapes or suited:
        rows += measure(name, (SHAPES | TINY)[name], options.repeats, options.torch_python)
    show(rows)
    if options.json is not None:
        options.json.write_text(json.dumps({"device": device, "jax": jax.__version__, "rows": rows}, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
