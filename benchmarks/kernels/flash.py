"""Causal attention: ours, jax.nn's (cuDNN on a GPU), jax's own Pallas kernels, PyTorch's in another interpreter.

Work that the mask excludes does not count, and the backward pass counts five products, as in arXiv:2307.08691.

Legend: B batch, S sequence, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.measure import Answer, Cost, Work, hopper, ours
from pallas_kernels._compat import target_device
from pallas_kernels.flash_attention import flash_attention

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


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
        """Number of visible (query, key) pairs in one row and head."""
        seen = min(self.window or self.s, self.s)
        return seen * (seen + 1) // 2 + (self.s - seen) * seen

    def cost(self, *, backward: bool) -> Cost:
        """Two products forward, five backward; each array once: q, k, v, out and logsumexp, and the gradients."""
        flops = (5 if backward else 2) * 2 * self.b * self.n * self.pairs * self.h
        item = jnp.dtype(self.dtype).itemsize
        queries, keys = self.b * self.s * self.n, self.b * self.s * self.k
        if backward:  # reads q, k, v, out, d_out, logsumexp, delta; writes d_q, d_k, d_v
            return Cost(flops, item * self.h * (4 * queries + 4 * keys) + 2 * 4 * queries)
        return Cost(flops, item * self.h * (2 * queries + 2 * keys) + 4 * queries)


SHAPES = {
    "Llama-3.1-8B, 4k": Shape(4, 4096, 32, 8, 128),
    "Llama-3.1-8B, 8k": Shape(2, 8192, 32, 8, 128),
    "Llama-3.1-8B, 32k": Shape(1, 32768, 32, 8, 128),
    "gpt-oss-20b, 8k, window 128": Shape(1, 8192, 64, 8, 64, window=128),
    "Gemma-2-9B, 8k, window 4096": Shape(1, 8192, 16, 8, 256, window=4096),
}
TINY = {"tiny": Shape(1, 48, 4, 2, 16, dtype="float32"), "tiny, window": Shape(1, 48, 4, 2, 16, 10, "float32")}


def work(shape: Shape, torch_python: str | None = None) -> Work:
    """Work of a shape: FLOPs, bytes, and the contenders to time."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (shape.n, shape.k, shape.k, shape.n)
    arrays = (
        jax.random.normal(k, (shape.b, shape.s, n, shape.h), shape.dtype) for k, n in zip(keys, heads, strict=True)
    )
    *inputs, d_out = arrays
    elsewhere = {}
    if torch_python is not None and shape.window is None:
        elsewhere["torch sdpa"] = functools.partial(torch_sdpa, torch_python, shape.dtype)
    return Work(
        dataclasses.asdict(shape),
        tuple(inputs),
        functools.partial(flash_attention, window=shape.window, implementation="xla"),
        contenders(shape),
        (shape.cost(backward=False), shape.cost(backward=True)),
        differentiated=3,
        d_out=d_out,
        elsewhere=elsewhere,
    )


def contenders(shape: Shape) -> dict[str, Attention]:
    """Ours by name, and what jax brings along, as far as they are made for this platform."""
    platform = target_device().platform
    found: dict[str, Attention] = {
        name: functools.partial(flash_attention, window=shape.window, implementation=name)
        for name in (*ours(), *hopper())
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


def torch_sdpa(python: str, dtype: str, inputs: tuple[Any, ...], d_out: Any, repeats: int) -> Answer:
    """PyTorch's scaled_dot_product_attention, in another interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        request = {"inputs": f"{folder}/in.npz", "results": f"{folder}/out.npz", "repeats": repeats, "dtype": dtype}
        np.savez(
            request["inputs"], **dict(zip("qkvd", (np.asarray(x, np.float32) for x in (*inputs, d_out)), strict=True))
        )
        done = subprocess.run([python, "-c", _TORCH], input=json.dumps(request), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        answer = json.loads(done.stdout.splitlines()[-1])
        results = np.load(request["results"])
        return Answer(answer["forward"], answer["both"], [results[x] for x in results.files], answer["on"])
