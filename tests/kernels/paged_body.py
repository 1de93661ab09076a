"""Shared test body of every implementation of paged attention: cases, a loop over tokens in float64, one check.

Everything that must not be read is nan, or a page number that is none.

Legend: L layers, P pages, K kv heads, C slots of a page, W numbers of a slot, R requests, J columns of the page table,
T tokens, N query heads, H head dim of keys, V of values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

from pallas_kernels._compat import interpreting
from pallas_kernels.paged_attention import PageFormat, PagePool, TreeMask, paged_attention

PLAIN = ("xla", "reference")
"""Implementations that run on any device, in any precision."""
LAYERS, LAYER = 3, 1


class Case(NamedTuple):
    requests: tuple[tuple[int, int], ...]  # (tokens held before, tokens of this step)
    n: int = 2
    k: int = 1
    h: int = 4
    v: int | None = None  # head dim of values, where it differs
    latent: bool = False
    page: int = 8
    padding: int = 0  # rows behind the last token
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    decode_only: bool = False
    multiple: int = 4  # of the width of slots
    shared: int = 0  # full pages that requests 0 and 1 have in common
    tree: bool = False  # the last slots of most requests hold trees, of this step and steps before

    @property
    def format(self) -> PageFormat:
        return PageFormat(self.k, self.h, self.v or self.h, self.latent, multiple=self.multiple)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that are not arrays."""
        scale = {"scale": 0.3} if self.latent else {}
        return {"window": self.window, "softcap": self.softcap, "decode_only": self.decode_only, **scale}


MIXED = ((0, 11), (23, 1), (0, 0), (9, 3), (7, 1), (16, 0), (40, 6))
DECODE = ((0, 1), (7, 1), (8, 1), (33, 1), (0, 0), (19, 1))
CASES = {
    "one token": Case(((0, 1),)),
    "one token of a long request": Case(((43, 1),), 4, 2, decode_only=True),
    "decode": Case(DECODE, 4, 2, decode_only=True),
    "decode, padded": Case(DECODE, 4, 2, padding=3, decode_only=True),
    "decode without the promise": Case(DECODE, 4, 2),
    "a prompt": Case(((0, 21),), 2, 2),
    "a piece of a prompt": Case(((13, 18),), 2, 2),
    "mixed": Case(MIXED, 4, 2, padding=2),
    "nothing at all": Case(((5, 0), (0, 0)), padding=3),
    "pages of 16": Case(MIXED, 4, 2, page=16),
    "pages of 32": Case(MIXED, 4, 2, page=32),
    "three queries a kv head": Case(MIXED, 6, 2),
    "one kv head": Case(MIXED, 4, 1),
    "values of another size": Case(MIXED, 4, 2, h=6, v=4),
    "window within a page": Case(MIXED, 2, 1, window=3),
    "window of one": Case(MIXED, 2, 1, window=1),
    "window over pages": Case(MIXED, 4, 2, window=13),
    "window, decode": Case(DECODE, 4, 2, window=9, decode_only=True),
    "softcap": Case(MIXED, 4, 2, softcap=0.7),
    "sinks": Case(MIXED, 4, 2, sinks=True),
    "latent": Case(MIXED, 20, 1, h=12, v=8, latent=True),
    "latent, decode": Case(DECODE, 6, 1, h=12, v=8, latent=True, decode_only=True),
    "shared pages": Case(((16, 3), (19, 1), (5, 2)), 4, 2, shared=2),
    "trees": Case(MIXED, 4, 2, tree=True),
    "trees of two words": Case(((5, 45), (40, 7)), 2, 1, tree=True),
    "trees, window": Case(MIXED, 4, 2, window=17, tree=True),
    "trees, latent": Case(MIXED, 6, 1, h=12, v=8, latent=True, padding=1, tree=True),
    "trees, everything": Case(
        MIXED, 12, 4, h=6, v=4, padding=3, window=19, softcap=1.3, sinks=True, page=16, tree=True
    ),
    "everything": Case(MIXED, 12, 4, h=6, v=4, padding=3, window=17, softcap=1.3, sinks=True),
    "everything, decode": Case(
        DECODE, 12, 6, h=6, v=4, padding=1, window=17, softcap=1.3, sinks=True, decode_only=True
    ),
}


PACKAGE = "pallas_kernels.paged_attention"
KILLERS = ("everything", "everything, decode", "pages of 32", "trees, window", "trees of two words")
"""Cases that a mutant is tried on, until one fails."""

_WRONG_SLOT = {"wrong slot": ("reference", "heads, slot[:, None]]", "heads, slot[:, None] - 1]")}
_TPU = {
    "mask off by one": ("(at <= place)", "(at < place)"),
    "window off by one": ("(at > place - window)", "(at >= place - window)"),
    "wrong page": ('["table"][self.row + column + j]', '["table"][self.row + column]'),
    "wrong slot": ("(place >= 0) & (place < self.tokens)", "(place > 0) & (place <= self.tokens)"),
    "missing rescale": ('["acc"][head, :m] * keep + part', '["acc"][head, :m] + part'),
    "another's queries": ('dot(refs["q"][head, :m]', 'dot(refs["q"][0, :m]'),
    "garbage": ("jnp.where(filled, held[:, head], 0)", "held[:, head]"),
    "branches seen": ("seen & jnp.logical_not(hides(words, at - self.first))", "seen"),
    "window by slots": ("place = place - behind", "place = place - 0 * behind"),
    "window from slots": ("least = jnp.minimum(self.position, self.first)", "least = self.position"),
    "unfinished copy": ("self._each_tile(lambda i: self._tile(i, read=True).wait())", "pass"),
}
_GPU = {
    "mask off by one": ("(kv_pos[None] <= at)", "(kv_pos[None] < at)"),
    "window off by one": (
        "(kv_pos[None] > own_place - options.window)",
        "(kv_pos[None] >= own_place - options.window)",
    ),
    "wrong page": (".at[request, at // page_size]", ".at[request, 0 * at]"),
    "wrong slot": ("mask), self.kv_head, at %", "mask), self.kv_head, (at + 1) %"),
    "missing rescale": ("x * keep + dot", "x + dot"),
    "another's queries": ("kv_head * plan.group + head", "head"),
    "new slots in every part": ("jnp.where(self.part == plan.parts - 1, pl.cdiv", "jnp.where(self.part >= 0, pl.cdiv"),
    "branches seen": ("seen & jnp.logical_not(hides(words, (kv_pos - branch)[None]))", "seen"),
    "window by slots": ('at - self._of_token("behind")[:, None]', "at"),
    "window from slots": ("least, own_place = jnp.minimum(position, branch)", "least, own_place = position"),
    "sinks in every part": ("self.part == 0", "self.part >= 0"),
}
MUTATIONS: dict[tuple[str, str], tuple[str, str, str]] = {
    ("reference", "mask off by one"): ("reference", "visible = at <= position", "visible = at < position"),
    ("reference", "window off by one"): ("reference", "visible &= at > position", "visible &= at >= position"),
    ("reference", "wrong scale"): ("reference", "format.keys(held)) * scale", "format.keys(held)) * scale * 1.01"),
    ("reference", "dropped sink"): ("reference", "total = total + jnp.exp(sink - top)", "pass"),
    ("xla", "mask off by one"): ("xla", "seen = at <= position", "seen = at < position"),
    ("xla", "window off by one"): ("xla", "seen &= at > (position if", "seen &= at >= (position if"),
    ("reference", "branches seen"): ("reference", "visible &= ~_hidden(", "visible &= True | _hidden("),
    ("reference", "window by slots"): ("reference", "position - tree.behind", "position - 0 * tree.behind"),
    ("xla", "branches seen"): ("xla", "seen &= ~hidden(", "seen &= True | hidden("),
    ("xla", "window by slots"): ("xla", "if hidden is None else position - behind)", ")"),
    ("xla", "window from slots"): ("xla", "first = jnp.minimum(first, tree.first[block.request])", "pass"),
    ("xla", "wrong word"): ("tree_mask", "at = slots - number * BITS", "at = slots - number"),
    ("xla", "wrong scale"): ("xla", "q.astype(dtype) * problem.scale", "q.astype(dtype)"),
    ("xla", "wrong page"): ("xla", "jnp.minimum(column, columns - 1)", "first * size // page_size"),
    ("xla", "wrong part of a page"): ("xla", "within.astype(number.dtype)", "zero"),
    ("xla", "missing rescale"): ("xla", "out * keep + jnp.einsum", "out + jnp.einsum"),
    ("xla", "garbage"): ("xla", "jnp.where(there[:, None], held, 0), None", "held, None"),
    ("xla", "another's tokens"): (
        "xla",
        "there = (jnp.arange(size) < block.tokens)",
        "there = (jnp.arange(size) < size)",
    ),
    **{(name, what): edit for name in PLAIN for what, edit in _WRONG_SLOT.items()},
    **{("pallas_tpu", what): ("pallas_tpu", *edit) for what, edit in _TPU.items()},
    **{("pallas_gpu", what): ("pallas_gpu", *edit) for what, edit in _GPU.items()},
    ("pallas_gpu", "parts not weighed"): (
        "two_phases",
        "jnp.where(weights > 0.0, out, 0.0) * weights",
        "jnp.where(weights > 0.0, out, 0.0)",
    ),
}
"""(implementation, mistake) -> (module of the package, text, text with the mistake)."""


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """Blocks so small that short requests cross many of them."""
    from pallas_kernels.paged_attention import config, pallas_gpu, pallas_tpu, xla

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "BLOCK_TOKENS", 4)
        patch.setattr(xla, "READ_SLOTS", (16, 8))
        tpu = config.PagedTpuBlocks(rows=32, slots=16, scores=256, buffer_bytes=2**20, cores=2)
        patch.setattr(pallas_tpu, "LANES", 4)
        patch.setattr(pallas_tpu, "MAX_UNROLLED", 64)
        patch.setattr(config, "tpu_blocks", lambda *_: tpu)
        patch.setattr(pallas_gpu, "MIN_DOT_DIM", 1)
        patch.setattr(config, "gpu_blocks", lambda *_: config.PagedGpuBlocks(rows=16, slots=8, programs=256))
        yield


class Step(NamedTuple):
    """The arrays of a step, as ``paged_attention`` takes them, and what it must return."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray | None
    rows: np.ndarray
    page_table: np.ndarray
    cu_q_lens: np.ndarray
    kv_lens: np.ndarray
    sinks: np.ndarray | None
    hidden: np.ndarray | None
    first: np.ndarray | None
    want: np.ndarray
    want_rows: np.ndarray

    @property
    def tokens(self) -> int:
        return int(self.cu_q_lens[-1])


def draw(rng: np.random.Generator, case: Case, dtype: Any = np.float64) -> Step:
    """A step of random numbers; what may be anything is nan, or no page."""
    form = case.format
    held, lengths = (np.array(x, np.int32) for x in zip(*case.requests, strict=True))
    kv_lens, starts = held + lengths, np.append(0, np.cumsum(lengths)).astype(np.int32)
    tokens = starts[-1] + case.padding
    columns = -(-int(kv_lens.max()) // case.page) + 2
    needed = -(-kv_lens // case.page)
    pages = int(needed.sum()) + 3
    numbers = rng.permutation(pages).astype(np.int32)
    table = rng.choice(np.array([-1, pages, pages + 7, 2**30, 0], np.int32), (len(kv_lens), columns))
    for r, count in enumerate(needed):
        table[r, :count], numbers = numbers[:count], numbers[count:]
    if case.shared:
        table[1, : case.shared] = table[0, : case.shared]

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(dtype)

    def slots(k: np.ndarray, v: np.ndarray | None) -> np.ndarray:
        used = k if v is None else np.concatenate([k, v], axis=-1)
        return np.pad(used, (*[(0, 0)] * (used.ndim - 1), (0, form.width - used.shape[-1])))

    q, k = normal(tokens, case.n, form.key_dim), normal(tokens, case.k, form.key_dim)
    v = None if case.latent else normal(tokens, case.k, form.value_dim)
    new = slots(k, v)
    sinks = normal(case.n) if case.sinks else None
    rows = np.full((LAYERS, pages, case.k, case.page, form.width), np.nan, dtype)
    for r, count in enumerate(held):
        for i in range(count):
            if not (case.shared and r == 1 and i < case.shared * case.page):
                rows[LAYER, table[r, i // case.page], :, i % case.page] = slots(
                    normal(case.k, form.key_dim), None if case.latent else normal(case.k, form.value_dim)
                )
    want_rows = rows.copy()
    for r, start in enumerate(starts[:-1]):
        for i in range(held[r], kv_lens[r]):
            want_rows[LAYER, table[r, i // case.page], :, i % case.page] = new[start + i - held[r]]
    parents = trees(rng, held, kv_lens) if case.tree else None
    hidden, first = (None, None) if parents is None else tree_mask(parents, starts, kv_lens, tokens)
    want = oracle(q, want_rows[LAYER], table, starts, kv_lens, sinks, case, parents)
    if case.window is not None:  # what lies before all windows may be given back to the pool
        least = held if first is None else np.minimum(held, first)
        for r, count in enumerate(np.maximum(least - case.window + 1, 0) // case.page):
            gone = table[r, :count].copy()
            rows[LAYER, gone] = want_rows[LAYER, gone] = np.nan
            table[r, :count] = pages + 3
    q[starts[-1] :], k[starts[-1] :] = np.nan, np.nan
    if v is not None:
        v[starts[-1] :] = np.nan
    return Step(q, k, v, rows, table, starts, kv_lens, sinks, hidden, first, want, want_rows)


def trees(rng: np.random.Generator, held: np.ndarray, kv_lens: np.ndarray) -> list[list[int]]:
    """Parent of each slot of each request: the slot before it, but in the last slots, where most have a tree."""
    found = []
    for r, (before, length) in enumerate(zip(held.tolist(), kv_lens.tolist(), strict=True)):
        parents = list(range(-1, length - 1))
        first = max(1, before - int(rng.integers(3)))
        for slot in range(first, length if r % 3 != 2 else 0):
            parents[slot] = int(rng.integers(max(first - 1, slot - 6), slot))
        found.append(parents)
    return found


def branch(parents: list[int], slot: int) -> list[int]:
    """Slots that a token sees, from the first to its own: their order is that of their positions."""
    seen = []
    while slot >= 0:
        seen.append(slot)
        slot = parents[slot]
    return seen[::-1]


def tree_mask(
    parents: list[list[int]], starts: np.ndarray, kv_lens: np.ndarray, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """The arrays of ``TreeMask``: a tree begins at the first slot that some later one does not see."""
    first = kv_lens.copy()
    for r, own in enumerate(parents):
        seen = [set(branch(own, slot)) for slot in range(len(own))]
        missing = [s for s in range(len(own)) if any(s not in later for later in seen[s:])]
        first[r] = min([*missing, kv_lens[r]])
    hidden = np.zeros((tokens, max(1, -(-int((kv_lens - first).max()) // 32))), np.uint32)
    for r, own in enumerate(parents):
        for row in range(starts[r], starts[r + 1]):
            slot = kv_lens[r] - starts[r + 1] + row
            for gone in set(range(slot)) - set(branch(own, slot)):
                hidden[row, (gone - first[r]) // 32] |= np.uint32(1 << (gone - first[r]) % 32)
    return hidden.view(np.int32), first


def oracle(q, pages, table, starts, kv_lens, sinks, case: Case, parents: list[list[int]] | None = None) -> np.ndarray:
    """One token and head at a time, in float64; of a tree each token sees its branch, as if it were a sequence."""
    form = case.format
    q, pages = np.asarray(q, np.float64), np.asarray(pages, np.float64)
    scale = case.options.get("scale", 1 / np.sqrt(form.key_dim))
    out = np.zeros((*q.shape[:2], form.value_dim))
    for r in range(len(kv_lens)):
        for t in range(starts[r], starts[r + 1]):
            place = kv_lens[r] - starts[r + 1] + t
            seen = np.arange(place + 1) if parents is None else np.array(branch(parents[r], place))
            seen = seen if case.window is None else seen[-case.window :]
            for n in range(q.shape[1]):
                held = pages[table[r, seen // case.page], n // (case.n // case.k), seen % case.page]
                scores = held[:, : form.key_dim] @ q[t, n] * scale
                if case.softcap is not None:
                    scores = case.softcap * np.tanh(scores / case.softcap)
                if sinks is not None:
                    scores = np.append(scores, sinks[n])
                weights = np.exp(scores - scores.max())
                values = held[:, 0 if case.latent else form.key_dim :][:, : form.value_dim]
                out[t, n] = weights[: len(seen)] @ values / weights.sum()
    return out


def program(implementation: str, case: Case) -> Any:
    """Compiled: a step's arrays -> (attended values, pages)."""

    @jax.jit
    def run(q, k, v, rows, page_table, cu_q_lens, kv_lens, sinks, hidden, first):
        pool, layer = PagePool(rows, case.format), jnp.int32(LAYER)
        out, pool = paged_attention(
            q,
            k,
            v,
            pool,
            layer,
            page_table,
            cu_q_lens,
            kv_lens,
            sinks=sinks,
            tree=None if hidden is None else TreeMask(hidden, first),
            implementation=implementation,
            **case.options,
        )
        return out, pool.rows

    return run


def error(got: Any, want: Any) -> float:
    """Relative; where values, which are drawn of size 1, happen to cancel, to a tenth of that."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 0.1 * want.size**0.5))


def check(
    implementation: str, case: Case, rng: np.random.Generator, bound: float = 2e-6, dtype: Any = np.float32
) -> float:
    """One step, twice, against float64: values, zeros for padding, and every bit of the pool; kernels are interpreted.

    Returns the error.
    """
    step = draw(rng, case, dtype)
    with interpreting() if implementation.startswith("pallas") else contextlib.nullcontext():
        run = program(implementation, case)
        (out, rows), again = (jax.device_get(run(*step[:-2])) for _ in range(2))
    if implementation == "pallas_tpu":
        races = interpret_pallas_call.races
        assert races is not None
        assert not races.races_found, "the race detector has printed where"
    np.testing.assert_array_equal(out, again[0])
    for got in (rows, again[1]):
        assert got.dtype == step.rows.dtype
        np.testing.assert_array_equal(bits(got), bits(step.want_rows))
    np.testing.assert_array_equal(np.asarray(out, np.float64)[step.tokens :], 0.0)
    wrong = error(out, step.want)
    assert out.dtype == step.q.dtype
    assert wrong <= bound, wrong
    return wrong


def bits(x: np.ndarray) -> np.ndarray:
    """Numbers as the bytes they are, so that every nan is itself."""
    return np.ascontiguousarray(x).view(np.uint8)
