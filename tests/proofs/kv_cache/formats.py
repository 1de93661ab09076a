"""KV cache formats of four and two bits: bytes, errors, the model's quality, and what KIVI's axes are worth."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxllm.infer import EngineConfig
from pallas_kernels.paged_attention import PageFormat, Slots
from pallas_kernels.paged_attention.channel_formats import KiviFormat
from pallas_kernels.paged_attention.kv_formats import KV_FORMATS
from tests.infer import engines
from tests.proofs.engine_two.kv_formats import nll
from tests.proofs.harness import proof

LIMITS = {"kivi4": 0.01, "kivi2": 0.05, "int4": 0.05, "bfp4": 0.10}
"""Relative change of the log-likelihood that is allowed: the first two are what the formats are for."""


@proof("kv_cache", cases=list(LIMITS), sample=1, bound=1.0)
def nll_of_four_and_two_bits(name: str) -> float:
    """SmolLM2 on the held-out plays: change of the negative log-likelihood over that of float32 pages, by its limit."""
    before, after = nll("auto", "plays"), nll(name, "plays")
    assert after != before
    return abs(after / before - 1) / LIMITS[name]


BYTES = [(name, model, page) for name in LIMITS for model, page in (("llama", 4), ("llama", 8), ("gemma3", 4))]
"""(format, model, positions of a page)."""


@proof("kv_cache", cases=BYTES, sample=1, bound={"bytes": 0.0, "temporaries": 0.0})
def page_bytes_in_programs(case: tuple[str, str, int]) -> dict[str, float]:
    """Argument bytes of engines that differ only in their pages, less the formula's; growth of temporaries."""
    name, model, page = case
    made = []
    for pages in (40, 90):
        sizes = EngineConfig(
            max_sequences=1, max_batched_tokens=8, max_len=32, page_size=page, pages=pages, buckets=(8,),
            samplers=("plain",), decode_steps=2, kv_dtype=name,
        )  # fmt: skip
        made.append(engines.build(sizes, model).runner)
    few, many = made
    grown, heads, dim = 0, 2, 8
    for group, before, after in zip(few.spec.groups, few.spec.pages, many.spec.pages, strict=True):
        one = {
            "int4": page * 2 * (dim // 2 + 4), "bfp4": page * 2 * (dim // 2 + 4),
            "kivi4": page * (dim + 4) + 4 * dim, "kivi2": page * (dim // 2 + 4) + 4 * dim,
        }[name]  # fmt: skip
        grown += (after - before) * len(group.layers) * heads * one
    assert grown > 0
    worst = {"bytes": 0.0, "temporaries": 0.0}
    for program in few.programs:
        if program.split("-")[0] in ("prompt", "decode"):
            before, after = (runner.programs[program].memory for runner in made)
            more = after.argument_size_in_bytes - before.argument_size_in_bytes
            worst["bytes"] = max(worst["bytes"], abs(more - grown))
            worst["temporaries"] = max(
                worst["temporaries"], float(after.temp_size_in_bytes - before.temp_size_in_bytes)
            )
    return worst


@proof("kv_cache", count=200, sample=3)
def axes_of_kivi(seed: int) -> None:
    """Keys with outlier channels: the error of attention is less with keys per channel than with the axes swapped."""
    rng = np.random.default_rng(seed)
    c, h = 32, int(rng.choice([32, 64, 128]))
    outliers = np.where(rng.random(h) < 0.06, rng.uniform(8, 20, h), 1.0)
    outliers[int(rng.integers(h))] = 12.0
    k = outliers * (rng.normal(size=(4, c, h)) + np.sign(rng.normal(size=h)) * (outliers > 1))
    v, q = rng.normal(size=(4, c, h)), rng.normal(size=(4, 16, h)) / outliers
    want = attention(q, k, v)
    error = {}
    for bits in (2, 4):
        for swapped in (False, True):
            row = KiviFormat(bits, swapped=swapped)
            page = row.encode_page(jnp.asarray(np.concatenate([k, v], -1), jnp.float32), (h, h))
            found = row.unpack(page["data"], page["scales"], (h, h), jnp.float32, page["channels"])
            held = np.asarray(found, np.float64)
            error[bits, swapped] = float(np.sqrt(np.mean((attention(q, held[..., :h], held[..., h:]) - want) ** 2)))
    assert error[2, False] < error[2, True]
    assert error[4, False] < error[4, True]


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


@proof("kv_cache", count=200, sample=3, bound={"int4": 1.0, "bfp4": 1.0, "kivi4": 1.0, "kivi2": 1.0})
def error_of_each_number(seed: int) -> dict[str, float]:
    """Keys and values of all sizes: the error of each number over the bound of its group, block, channel or token."""
    rng = np.random.default_rng(seed)
    worst, (c, h) = {}, (32, int(rng.choice([16, 64, 80])))
    sizes = 10.0 ** rng.uniform(-3, 3, (3, 1, 2 * h)) * (rng.random((3, 1, 2 * h)) > 0.1)
    rows = (sizes * rng.standard_t(3, (3, c, 2 * h)) + sizes * rng.normal(size=(3, 1, 2 * h))).astype(np.float32)
    for name in LIMITS:
        form = PageFormat(3, h, h, encoding=name)
        if (row := form.kv_format).residual:
            page = row.encode_page(jnp.asarray(rows), (h, h))  # pyright: ignore[reportAttributeAccessIssue]
            got = form.unpack(Slots(**page), "float32")
        else:
            data, words = KV_FORMATS[name].encode(jnp.asarray(rows), (h, h), "float32")
            got = form.unpack(Slots(data, jnp.swapaxes(words, -1, -2)), "float32")
        error = np.abs(np.asarray(got, np.float64) - rows)
        bound = bounds(name, rows.astype(np.float64), h)
        worst[name] = float(np.max(error / bound))
    return worst


def bounds(name: str, rows: np.ndarray, h: int) -> np.ndarray:
    """Largest legal error of each number: half a step, and the rounding of scale and minimum to float16."""

    def affine(x: np.ndarray, axis: int, bits: int) -> np.ndarray:
        least, most = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
        span, levels = most - least, 2**bits - 1
        # 2**-24: the least number of float16, by which a scale may be off at each level.
        off = np.abs(least) * 2**-10 + span * 2**-10 + (levels + 1) * 2.0**-24
        return np.broadcast_to(span / levels / 2 + off, x.shape)

    def grouped(x: np.ndarray, size: int, bits: int) -> np.ndarray:
        shape = *x.shape[:-1], -1, size
        return affine(x.reshape(shape), -1, bits).reshape(x.shape)

    k, v, group = rows[..., :h], rows[..., h:], int(np.gcd(h, 32))
    if name == "int4":
        return np.concatenate([grouped(k, group, 4), grouped(v, group, 4)], -1)
    if name == "bfp4":
        blocks = np.abs(rows.reshape(*rows.shape[:-1], -1, 16)).max(-1, keepdims=True)
        # A step is an eighth of the power of two above the largest; 7.5 to 8 steps are rounded down to 7.
        return np.broadcast_to(np.maximum(blocks / 4, 2.0**-126), (*blocks.shape[:-1], 16)).reshape(rows.shape)
    bits = 4 if name == "kivi4" else 2
    return np.concatenate([affine(k, -2, bits), grouped(v, group, bits)], -1)
