"""ShadowKV: KV cache format with low-rank keys on the device and values in host memory (arXiv:2410.21465).

The keys of a text have a low rank before they are rotated, and its values have not. So the device has a few
coefficients of each token's key, of all kv heads together, and their basis; the values are in host memory. The mean of
a chunk's rotated keys, its landmark, says whether a query reads the chunk (``chosen_chunks``): only then are its keys
computed from their coefficients, and its values fetched. The chunks whose keys are least like their landmark, the
outliers, are whole on the device, and every query reads them.

A page is encoded as a whole, with a basis of its own, once it is behind the latest tokens, which are in full precision
(``residual_window``). In its array of rows on the device, a page has for each kv head its landmarks, the keys and the
values of its outliers, and the basis.

Legend: K kv heads, C slots of a page, W values of a slot, H head dim, X chunks of a page, O tokens of its outliers, Z
rank, D = K x H, R = X + 2 O + Z rows of a page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.kv_formats import KV_FORMATS, KVFormat, Scales

CHUNK = 8
"""Tokens of a chunk, as in the paper."""
RECENT = 64
"""Latest tokens of a sequence in full precision."""

Turn = Callable[[Any, Any], Any]
"""Rotates keys [*any, H] as if they were ``by`` positions later, Int[Array, "*any"]."""


class ShadowFormat(KVFormat):
    """``shadowkv``: low-rank keys, landmarks and outliers on the device, values in host memory.

    Args:
        rank: coefficients of a token's key, of all kv heads together.
        tokens: tokens of the chunks that a query chooses, for each kv head.
        outliers: chunks of a page, for each kv head, that are whole on the device.
        residual: see ``KVFormat``.
        chunk: tokens of a chunk.
    """

    quantised = True
    on_host = True
    page_size = 256

    def __init__(
        self, rank: int = 32, tokens: int = 256, outliers: int = 1, residual: int = RECENT, chunk: int = CHUNK
    ):
        self.rank, self.tokens, self.outliers, self.residual, self.chunk = rank, tokens, outliers, residual, chunk

    def of(self, sizes: str) -> ShadowFormat:
        """The format with the sizes ``RANK[,TOKENS[,OUTLIERS]]``, such as "32,256,1".

        Raises:
            ValueError: they are not legal.
        """
        given = sizes.split(",")
        numbers = [int(one) for one in given if one.isdecimal()]
        legal = len(numbers) == len(given) <= 3 and numbers[0] > 0
        if not legal or min([self.chunk, *numbers[1:2]]) < self.chunk:
            raise ValueError(
                f"kv_dtype = 'shadowkv:{sizes}'; give shadowkv:RANK[,TOKENS[,OUTLIERS]], such as shadowkv:32,256,1: "
                f"the rank of a page's keys, the tokens that a query chooses ({self.chunk} or more), and the chunks of "
                f"{self.chunk} tokens in a page that are whole on the device."
            )
        rank, tokens, outliers = [*numbers, *(self.rank, self.tokens, self.outliers)[len(numbers) :]]
        return ShadowFormat(rank, tokens, outliers, self.residual, self.chunk)

    def check(self, page_size: int, kv_heads: int, parts: tuple[int, ...]) -> None:
        """Checks that pages of so many slots can have this format.

        Raises:
            ValueError: names the size, and what is legal.
        """
        what = f"kv_dtype = 'shadowkv:{self.rank},{self.tokens},{self.outliers}'"
        if page_size % self.chunk:
            raise ValueError(f"engine: {what} needs a page_size that is a multiple of {self.chunk}, not {page_size}.")
        most = min(page_size, kv_heads * parts[0])
        if self.rank > most:
            raise ValueError(
                f"engine: {what}: the keys of a page have a rank of {most} at most, the less of its {page_size} "
                f"positions and {kv_heads} x {parts[0]} channels; give a smaller rank or a larger page_size."
            )
        if self.outliers >= page_size // self.chunk:
            raise ValueError(
                f"engine: {what}: a page of {page_size} positions has {page_size // self.chunk} chunks; give fewer "
                "outliers than that, or a larger page_size."
            )
        if len(parts) != 2 or parts[0] != parts[1]:
            raise ValueError(f"engine: {what} is for keys and values of one head dim, not of {parts}; choose kivi4.")

    def elements(self, parts: tuple[int, ...]) -> int:
        """Elements of a slot, which are in host memory: those of the value."""
        return parts[-1]

    def width(self, parts: tuple[int, ...], stored_width: int) -> int:
        """Values of a slot."""
        return sum(parts)

    def channels(self, parts: tuple[int, ...]) -> int:
        """Words of a page: the numbers of its outlier chunks."""
        return self.outliers

    def rows(self, page_size: int) -> int:
        """Rows of a page on the device, of the head dim each, for each kv head (R)."""
        return page_size // self.chunk + 2 * self.outliers * self.chunk + self.rank

    def device_elements(self, page_size: int, kv_heads: int, parts: tuple[int, ...]) -> int:
        """Elements of a page on the device, in one layer: coefficients of its tokens, and rows of all kv heads."""
        return page_size * self.rank + kv_heads * self.rows(page_size) * parts[0]

    def encode_page(
        self, page: Float[Array, "K C W"], parts: tuple[int, ...], at: Int[Array, " C"], turn: Turn | None
    ) -> dict[str, Array]:
        """Arrays of a whole page by their names in ``Slots``.

        They are data [K, C, V], channels [K, 1, outliers], keys [K, R, H] and factors [1, C, Z].

        Args:
            page: keys, after RoPE, and values.
            parts: head dims of keys and values.
            at: positions of the tokens.
            turn: rotates keys; None: they have no rotation.
        """
        kv, size, _ = page.shape
        keys, values = jnp.split(page, [parts[0]], axis=-1)
        chunked = keys.reshape(kv, size // self.chunk, self.chunk, -1)
        wide = chunked.astype(jnp.promote_types(page.dtype, jnp.float32))
        landmarks = jnp.mean(wide, axis=2)
        # Repeated text has chunks that are alike but for rounding: the first of them is taken however it was computed.
        least = jnp.round(jnp.min(likeness(wide, landmarks), axis=2), 4)
        outliers = jax.lax.top_k(-least, self.outliers)[1]

        def whole(x: Array) -> Array:
            found = x.reshape(kv, size // self.chunk, self.chunk, -1)
            found = jnp.take_along_axis(found, outliers[..., None, None], axis=1)
            return found.reshape(kv, self.outliers * self.chunk, x.shape[-1])

        still = keys if turn is None else turn(keys, jnp.broadcast_to(-at, keys.shape[:2]))
        factors, basis = low_rank(still.swapaxes(0, 1).reshape(size, -1), self.rank)
        basis = basis.reshape(self.rank, kv, -1).swapaxes(0, 1)
        rows = [x.astype(page.dtype) for x in (landmarks, whole(keys), whole(values), basis)]
        return {
            "data": values,
            "channels": outliers[:, None].astype(jnp.int32),
            "keys": jnp.concatenate(rows, axis=1),
            "factors": factors[None].astype(page.dtype),
        }

    def decode_keys(
        self, factors: Float[Array, "*#any S Z"], basis: Float[Array, "*#any Z H"], at: Int[Array, "*#any S"],
        turn: Turn | None,
    ) -> Float[Array, "*#any S H"]:  # fmt: skip
        """Rotated keys at some positions, from their coefficients and a kv head's basis."""
        keys = jnp.einsum("...sz,...zh->...sh", factors, basis)
        return keys if turn is None else turn(keys, jnp.broadcast_to(at, keys.shape[:-1])).astype(keys.dtype)

    def encode(self, rows: Array, parts: tuple[int, ...], dtype: Any) -> tuple[Array, None]:
        """Not possible: the basis is of a page's tokens together; see ``encode_page``.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("ShadowKV encodes whole pages: see encode_page and residual_window.")

    def decode(self, tile: Array, scales: Scales, first: object, dtype: Any) -> Array:
        """Not possible of a slot alone; see ``chosen_chunks``.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("ShadowKV decodes the chunks that a query chooses: see chosen_chunks.")


def likeness(keys: Float[Array, "K X S H"], landmarks: Float[Array, "K X H"]) -> Float[Array, "K X S"]:
    """Cosine similarity of each key and its chunk's landmark; 0 where one of the two is zero."""
    sizes = jnp.linalg.norm(keys, axis=-1) * jnp.linalg.norm(landmarks, axis=-1)[..., None]
    return jnp.einsum("kxsh,kxh->kxs", keys, landmarks) / jnp.where(sizes == 0.0, 1.0, sizes)


def low_rank(x: Float[Array, "C D"], rank: int) -> tuple[Float[Array, "C Z"], Float[Array, "Z D"]]:
    """(coefficients, basis), whose product is the matrix of this rank that is next to ``x``: its truncated SVD.

    Singular vectors of the smaller side are the eigenvectors of its Gram matrix, which every platform computes; the
    other factor is a projection on them, so that at full rank the product is ``x`` however small a singular value is.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    by_token = x.shape[0] <= x.shape[1]
    side = wide if by_token else wide.T
    gram = jnp.matmul(side, side.T, precision="highest")
    vectors = jnp.linalg.eigh(gram)[1][:, ::-1][:, :rank]
    other = jnp.matmul(vectors.T, side, precision="highest")
    return (vectors, other) if by_token else (other.T, vectors.T)


KV_FORMATS["shadowkv"] = ShadowFormat()
