"""Experts on the host: those of one mixture layer, each in as few bits as its codes need (EdgeMoE, arXiv:2308.14352).

Experts that a file has in different bits are loaded with the most of these, so that all have one format on the device.
On the host the upper bits of the others, which are 0, are left out; the program that writes an expert into a slot puts
them back. So an expert of few bits takes less host memory, and is copied faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models.packed_weight import PackedWeight, WeightFormat, is_packed
from jaxllm.quant.formats.code_groups import WORDS, CodeGroups
from jaxllm.quant.grids import MinimumGrid

WIDTHS = (2, 3, 4, 5, 6)
"""Bits that codes may have on the host, if the device has them with more."""


class HostExperts:
    """Experts of a layer on the host.

    Args:
        experts: arrays [E, ...].

    Attributes:
        whole: shapes and formats of one expert in a slot, [1, ...].
        each: the experts, [1, ...] arrays, some with codes of fewer bits than ``whole``.
        tier: "host".
    """

    tier = "host"

    def __init__(self, experts: Any):
        many = jax.tree.leaves(experts)[0].shape[0]
        self.whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), experts)
        self.each = [
            in_fewest_bits(jax.tree.map(lambda x, n=n: np.asarray(x[n : n + 1]), experts)) for n in range(many)
        ]

    def __len__(self) -> int:
        return len(self.each)

    @property
    def shapes(self) -> Sequence[Any]:
        """The experts, of which programs take the shapes."""
        return self.each

    def read(self, expert: int) -> Any:
        """Arrays of an expert, [1, ...]."""
        return self.each[expert]

    @property
    def nbytes(self) -> int:
        """Bytes of all experts."""
        return sum(x.nbytes for x in jax.tree.leaves(self.each))


def in_fewest_bits(expert: Any) -> Any:
    """An expert whose codes above a minimum have as many bits as the largest of them asks for, in all its matrices."""
    matrices = [x for x in jax.tree.leaves(expert, is_leaf=is_packed) if _has_minima(x)]
    if not matrices:
        return expert
    with jax.default_device(jax.devices("cpu")[0]):
        codes = [np.asarray(x.format.unpack_codes(jnp.asarray(x.values))) for x in matrices]
        need = int(max(x.max() for x in codes)).bit_length()
        legal = (n for n in WIDTHS if n >= need and all(_fits(x, n) for x in matrices))
        if (bits := next(legal, 8)) >= matrices[0].format.grid.bits:
            return expert

        def narrow(x: Any) -> Any:
            if not _has_minima(x):
                return x
            form = replace(x.format, grid=replace(x.format.grid, bits=bits))
            return recoded(x, form)

        return jax.tree.map(narrow, expert, is_leaf=is_packed)


def recoded(weight: PackedWeight, form: WeightFormat) -> PackedWeight:
    """The weight with the same codes in more or fewer bits."""
    if weight.format == form:
        return weight
    assert isinstance(weight.format, CodeGroups)
    assert isinstance(form, CodeGroups)
    codes = weight.format.unpack_codes(jnp.asarray(weight.values))
    values = form.pack_codes(codes, codes.shape)
    values = np.asarray(values) if isinstance(weight.values, np.ndarray) else values
    return replace(weight, values=values, format=form)


def write_expert(slots: Any, number: jax.Array, content: Any) -> tuple[jax.Array, ...]:
    """Arrays of a layer's slots with an expert written into one of them, in the format that the slots have.

    They are the leaves of ``slots``: results of programs whose executables are kept in files are tuples.
    """

    def update(x: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, new, number, axis=0)

    def put(x: Any, new: Any) -> Any:
        return jax.tree.map(update, x, recoded(new, x.format) if is_packed(x) else new)

    return tuple(jax.tree.leaves(jax.tree.map(put, slots, content, is_leaf=is_packed)))


def _has_minima(x: Any) -> bool:
    """Whether a leaf has codes whose values do not depend on their number of bits."""
    return is_packed(x) and type(x.format) is CodeGroups and isinstance(x.format.grid, MinimumGrid)


def _fits(x: PackedWeight, bits: int) -> bool:
    assert isinstance(x.format, CodeGroups)
    return x.shape[x.format.axis] % WORDS[bits][0] == 0
