"""Paged attention of real models, decode and mixed batches, compiled for absent TPUs and GPUs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.paged_attention import PageFormat, PagePool, Slots, TreeMask, paged_attention
from pallas_kernels.paged_attention.pages import empty_slots
from pallas_kernels.paged_attention.residual_window import Residual
from sharding.isolate import run_isolated
from sharding.topology import Topology

TOPOLOGIES = ("v4:2x2x1", "v5e:1x1", "v5p:2x2x1", "v6e:1x1", "tpu7x:2x2x1", "h100:1x2", "b200:1x2")
EXEMPT: dict[tuple[str, str], str] = {}
"""(shape, topology) -> a part of the compiler's reason for refusing it."""
TEMPORARIES = 0.3
"""Bytes of temporaries for each byte of arguments and results, which have the pool twice: less than half of it."""
LAYERS = 2


@dataclass(frozen=True)
class Shape:
    """Step of one device: ``requests`` of up to ``longest`` tokens over a pool of two layers."""

    n: int
    k: int
    h: int
    v: int | None = None
    latent: bool = False
    page: int = 16
    tokens: int = 64
    requests: int = 64
    longest: int = 8192
    held: int = 131072  # tokens that the pool holds
    decode_only: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    multiple: int = 128
    dtype: str = "bfloat16"
    encoding: str = "plain"
    words: int = 0  # of the tree mask
    two_phase: bool = False  # first the pages that requests share

    @property
    def format(self) -> PageFormat:
        return PageFormat(self.k, self.h, self.v or self.h, self.latent, self.encoding, self.multiple)

    @property
    def in_rings(self) -> bool:
        """Whether the latest tokens are in ring buffers."""
        return self.format.kv_format.residual > 0


def mixed(shape: Shape, **changes: Any) -> Shape:
    """Prefill chunks beside decoded tokens."""
    return dataclasses.replace(shape, tokens=2048, decode_only=False, **changes)


def trees(shape: Shape, words: int, **changes: Any) -> Shape:
    """Trees of draft tokens, of up to so many words each."""
    return dataclasses.replace(shape, tokens=256, requests=16, decode_only=False, words=words, **changes)


_LLAMA = Shape(32, 8, 128)
_GEMMA = Shape(8, 4, 256, page=64, window=4096, softcap=50.0)
_GPT_OSS = Shape(64, 8, 64, window=128, sinks=True)
_MLA = Shape(128, 1, 576, v=512, latent=True, page=64, held=2**20)
SHAPES = {
    "Llama-3-8B, decode": _LLAMA,
    "Llama-3-8B, decode of one request, 128k": dataclasses.replace(_LLAMA, tokens=1, requests=1, longest=131072),
    "Llama-3-8B, mixed": mixed(_LLAMA),
    "Llama-3-8B, mixed, pages of 128": mixed(_LLAMA, page=128),
    "Llama-3-70B, an eighth of the heads, decode": Shape(8, 1, 128, page=128),
    "Qwen3-0.6B, mixed": mixed(Shape(16, 8, 128, page=64)),
    "Qwen2-7B, an odd group, mixed": mixed(Shape(28, 4, 128, page=64)),
    "Gemma-2-2B, decode": _GEMMA,
    "Gemma-2-2B, mixed": mixed(_GEMMA),
    "gpt-oss-20b, decode": _GPT_OSS,
    "gpt-oss-20b, mixed": mixed(_GPT_OSS),
    "DeepSeek-V3, decode": _MLA,
    "DeepSeek-V3, an eighth of the heads, mixed": mixed(dataclasses.replace(_MLA, n=16)),
    "Phi-3-mini, decode": Shape(32, 32, 96, held=32768),
    "Phi-2, mixed": mixed(Shape(32, 32, 80, held=65536)),
    "Llama-3-8B, trees of 32 tokens": trees(_LLAMA, 1),
    "gpt-oss-20b, trees of 32 tokens": trees(_GPT_OSS, 1),
    "DeepSeek-V3, an eighth of the heads, trees of 128 tokens": trees(dataclasses.replace(_MLA, n=16), 4),
    "SmolLM2-135M, mixed, float32": mixed(Shape(9, 3, 64, dtype="float32")),
}
QUANTISED = {
    "Llama-3-8B, decode, int8": dataclasses.replace(_LLAMA, page=64, encoding="int8"),
    "Llama-3-8B, mixed, fp8": mixed(dataclasses.replace(_LLAMA, page=64, encoding="fp8")),
    "gpt-oss-20b, mixed, int8": mixed(dataclasses.replace(_GPT_OSS, page=64, encoding="int8")),
    "DeepSeek-V3, decode, fp8": dataclasses.replace(_MLA, encoding="fp8"),
    "Llama-3-8B, decode, int4": dataclasses.replace(_LLAMA, page=128, encoding="int4"),
    "Llama-3-8B, decode, bfp4": dataclasses.replace(_LLAMA, page=128, encoding="bfp4"),
    "Llama-3-8B, decode, kivi4": dataclasses.replace(_LLAMA, page=128, encoding="kivi4"),
    "Llama-3-8B, decode, kivi2": dataclasses.replace(_LLAMA, page=128, encoding="kivi2"),
    "Llama-3-8B, mixed, int4": mixed(_LLAMA, page=128, encoding="int4"),
    "Llama-3-8B, mixed, kivi2": mixed(_LLAMA, page=128, encoding="kivi2"),
    "gpt-oss-20b, mixed, bfp4": mixed(_GPT_OSS, page=128, encoding="bfp4"),
    "gpt-oss-20b, decode, kivi4": dataclasses.replace(_GPT_OSS, page=128, encoding="kivi4"),
    "DeepSeek-V3, decode, int4": dataclasses.replace(_MLA, page=128, encoding="int4"),
    "DeepSeek-V3, an eighth of the heads, mixed, bfp4": mixed(
        dataclasses.replace(_MLA, n=16, page=128, encoding="bfp4")
    ),
}
"""With quantised pages."""
TWO_PHASES = {
    "Llama-3-8B": dataclasses.replace(_LLAMA, two_phase=True),
    "Llama-3-8B, int8": dataclasses.replace(_LLAMA, page=64, encoding="int8", two_phase=True),
    "DeepSeek-V3": dataclasses.replace(_MLA, two_phase=True),
}
"""Decode steps whose requests share pages."""
CELLS = tuple((shape, topology) for shape in SHAPES for topology in TOPOLOGIES)


def compile_on(topology: Topology, shape: dict[str, Any]) -> dict[str, float]:
    """In a child process: compiles a ``Shape``; bytes of arguments and results, and of temporaries."""
    from jaxllm.compiler import aot

    x, n = Shape(**shape), topology.num_devices
    form = x.format
    mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Explicit,), devices=topology.devices())

    def array(*shape: int, dtype: str = x.dtype, split: int | None = 0) -> jax.ShapeDtypeStruct:
        spec = P() if split is None else P(*[None] * split, "data")
        full = [size * n if i == split else size for i, size in enumerate(shape)]
        return jax.ShapeDtypeStruct(tuple(full), dtype, sharding=NamedSharding(mesh, spec))

    def zeros() -> Slots:
        return empty_slots(
            form, layers=LAYERS, pages=x.held // x.page, page_size=x.page, dtype=x.dtype, sequences=x.requests
        )  # fmt: skip

    held, structure = jax.tree.flatten(jax.eval_shape(zeros))
    pages = [array(*one.shape, split=1, dtype=str(one.dtype)) for one in held]
    arguments = [*pages, array(x.tokens, x.n, x.h), array(x.tokens, x.k, x.h)]
    arguments += [] if x.latent else [array(x.tokens, x.k, form.value_dim)]
    arguments += [array(size, dtype="int32") for size in (x.requests + 1, x.requests)]
    arguments += [array(x.requests, -(-x.longest // x.page), dtype="int32"), array(dtype="int32", split=None)]
    arguments += [array(x.tokens, x.words, dtype="int32"), array(x.requests, dtype="int32")] if x.words else []
    arguments += [array(x.requests, dtype="int32")] * (x.two_phase + 2 * x.in_rings)
    specs = tuple(argument.sharding.spec for argument in arguments)

    def step(*given: Any) -> Any:
        pool, (q, k, *rest) = jax.tree.unflatten(structure, given[: len(pages)]), given[len(pages) :]
        v, (starts, lens, table, layer, *tree) = (None, rest) if x.latent else (rest[0], rest[1:])
        residual = Residual(tree.pop(), tree.pop()) if x.in_rings else None
        shared = tree.pop() if x.two_phase else None
        out, pool = paged_attention(
            q,
            k,
            v,
            PagePool(pool.data, form, *pool[1:]),
            layer,
            table,
            starts,
            lens,
            tree=TreeMask(*tree) if tree else None,
            sinks=jnp.arange(x.n, dtype=jnp.float32) if x.sinks else None,
            scale=0.1,
            window=x.window,
            softcap=x.softcap,
            decode_only=x.decode_only,
            shared=shared,
            residual=residual,
            implementation=f"pallas_{topology.platform}",
        )
        return *jax.tree.leaves(pool.slots), out

    out_specs = specs[: len(pages) + 1]
    donated = tuple(range(len(pages)))
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out_specs), donate_argnums=donated)
    report = aot.compile(run, *arguments, topology=topology, mesh=mesh)
    both = report.argument_bytes + report.output_bytes
    others = sum(x.size * x.dtype.itemsize for x in arguments[len(pages) :])
    pages_bytes = x.held // x.page * x.k * LAYERS * form.page_bytes(x.page, x.dtype)
    recent = jax.tree.unflatten(structure, held).recent
    ring_bytes = 0 if recent is None else recent.size * recent.dtype.itemsize
    return {
        "bytes": both, "temp_bytes": report.temp_bytes, "seconds": report.compile_seconds, "page_bytes": pages_bytes,
        "ring_bytes": ring_bytes, "page_excess": report.argument_bytes - others / n - pages_bytes - ring_bytes,
    }  # fmt: skip


def compile_cell(shape: str, topology: str) -> dict[str, float]:
    """Compiles a cell in a child process; raises what the compiler says."""
    return run_isolated(
        "tests.kernels.paged_aot:compile_on",
        topology,
        {"shape": dataclasses.asdict((SHAPES | QUANTISED | TWO_PHASES)[shape])},
    )
