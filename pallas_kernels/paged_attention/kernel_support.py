"""Kernel support: which pages the Pallas kernels of paged attention read."""

from __future__ import annotations

from jaxtyping import Array

from pallas_kernels._pallas import check_supported
from pallas_kernels.paged_attention.pages import PageFormat, Slots
from pallas_kernels.paged_attention.retention import Retention


def check_format(name: str, format: PageFormat, q: Array, new: Slots, pool: Slots) -> None:
    """Checks that a Pallas kernel can read pages of this format: plain ones of the queries' dtype, or of bytes.

    Raises:
        NotImplementedError: names the limit; or see ``pallas_kernels._pallas.check_supported``.
    """
    if format.encoding == "plain":
        check_supported(name, q=q, new=new.data, pool=pool.data)
        return
    if format.layout is None or pool.data.dtype.itemsize != 1:
        raise NotImplementedError(
            f"{name} reads plain pages, and pages of bytes whose format has a layout (KVFormat.layout), not "
            f"{format.encoding!r}; implementation 'xla' reads those."
        )
    check_supported(name, q=q)


def check_positional(name: str, retention: Retention | None) -> None:
    """Checks that slots are in the order of positions.

    Raises:
        NotImplementedError: there is a retention rule.
    """
    if retention is not None:
        raise NotImplementedError(
            f"{name} takes slots in the order of positions, not under a retention rule; implementation 'xla' does."
        )
