"""Formats below eight bits in the Pallas kernels: equal to the reference on drawn shapes, compiled for every device."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import interpreting
from pallas_kernels.paged_attention import PagePool, paged_attention
from pallas_kernels.paged_attention.channel_formats import KiviFormat
from pallas_kernels.paged_attention.kv_formats import KV_FORMATS
from tests.kernels import encoded_body, paged_aot, paged_body, races
from tests.kernels.paged_body import LAYER, Case
from tests.kernels.test_paged_attention import encoded
from tests.proofs.harness import proof

KERNELS = "pallas_tpu", "pallas_gpu"
ALSO_COVERS = ("tests/kernels/paged_aot.py", "tests/kernels/paged_body.py", "tests/kernels/encoded_body.py")


def drawn(rng: np.random.Generator) -> Case:
    """Any requests, head dims and options over pages of 32; of all head dims those that two values a byte fit."""
    decode, k, latent = bool(rng.random() < 0.4), int(rng.integers(1, 3)), bool(rng.random() < 0.3)
    many = [(int(rng.integers(0, 90)), int(rng.choice([0, 1, 1, 2, 13, 40]))) for _ in range(int(rng.integers(1, 5)))]
    k, h = 1 if latent else k, 2 * int(rng.integers(2, 9))
    return Case(
        tuple((held, min(new, 1) if decode else new) for held, new in [*many, (7, 1)]),
        k * int(rng.integers(1, 5)), k, h, v=2 * int(rng.integers(1, h // 2 + 1 if latent else 9)), latent=latent,
        page=32, padding=int(rng.integers(0, 3)), window=None if rng.random() < 0.6 else int(rng.integers(1, 60)),
        softcap=None if rng.random() < 0.6 else 0.7, sinks=bool(rng.random() < 0.4), decode_only=decode,
    )  # fmt: skip


@proof("kv_cache", cases=[(name, encoding, seed) for seed in range(60) for encoding in ("int4", "bfp4") for name in
       KERNELS], sample=3, bound=2e-6)  # fmt: skip
def kernels_read_four_bits(case: tuple[str, str, int]) -> float:
    """Drawn steps by a kernel, interpreted, with small blocks: values less the reference's, and every bit of pages and
    scales; a kernel of TPUs has no race."""
    name, encoding, seed = case
    rng = np.random.default_rng([seed, *encoding.encode()])
    shape = drawn(rng)
    step, form = paged_body.draw(rng, shape, np.float32), dataclasses.replace(shape.format, encoding=encoding)
    pool = encoded(step, shape, form)
    q, k, table, starts, lens = (jnp.asarray(x) for x in (*step[:2], *step[4:7]))
    v, sinks = (None if x is None else jnp.asarray(x) for x in (step.v, step.sinks))

    def attend(pool: PagePool, name: str) -> tuple[jax.Array, PagePool]:
        return paged_attention(
            q, k, v, pool, LAYER, table, starts, lens, sinks=sinks, implementation=name, **shape.options
        )

    want, after = jax.device_get(jax.jit(attend, static_argnums=1)(pool, "reference"))
    raced = races.none_found() if name == "pallas_tpu" else contextlib.nullcontext()
    with paged_body.small_pieces(), interpreting(), raced:
        found, held = jax.device_get(jax.jit(attend, static_argnums=1)(pool, name))
    for one, other in zip(jax.tree.leaves(held), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(paged_body.bits(one), paged_body.bits(other))
    return float(paged_body.error(found, want))


@proof("kv_cache", cases=[(name, bits, seed) for seed in range(25) for bits in (2, 4) for name in KERNELS], sample=2,
       bound=2e-6)  # fmt: skip
def kernels_read_encoded_pages(case: tuple[str, int, int]) -> float:
    """The same with histories of steps over KIVI's pages, which a kernel reads, and windows, which plain JAX does."""
    name, bits, seed = case
    rng = np.random.default_rng([seed, bits])
    with pytest.MonkeyPatch.context() as patch, paged_body.small_pieces():
        patch.setitem(KV_FORMATS, "drawn", KiviFormat(bits, int(rng.integers(1, 70))))
        return encoded_body.check(name, encoded_body.drawn(rng, "drawn", 8 // bits), rng)


BELOW_EIGHT = [name for name, shape in paged_aot.QUANTISED.items() if shape.encoding not in ("int8", "fp8")]


@proof("kv_cache", cases=[(shape, topology) for shape in BELOW_EIGHT for topology in paged_aot.TOPOLOGIES], sample=1,
       bound={"temporaries": 0.45, "page_bytes": 0.01})  # fmt: skip
def formats_compile_in_kernels(case: tuple[str, str]) -> dict[str, float]:
    """Compiled for each kind of device: bytes of temporaries over those of arguments and results, which have the pages
    twice; and the bytes of pages in the program less the formula's, of which the rest is the padding of small
    arguments. Temporaries of steps that only decode are less than a twentieth, so no array of pages is copied."""
    found, (shape, _) = paged_aot.compile_cell(*case), case
    if paged_aot.QUANTISED[shape].decode_only:
        assert found["temp_bytes"] <= found["bytes"] / 20
    return {
        "temporaries": found["temp_bytes"] / found["bytes"],
        "page_bytes": abs(found["page_excess"]) / found["page_bytes"],
    }
