"""Format names: `int4_g128_asym`, `lut4`, `w4a8_g128`; their grammar is here alone.

A name is a base, then options in any order: `_gN`, a scale for every N inputs, and `_asym` or `_sym`, codes with or
without zero points. Which options a base takes is its row of ``BASES``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxllm.config import closest

LOOKUP_GROUP = 64
"""Inputs that share a scale in formats with a lookup table, where none is given."""


class FormatBase(NamedTuple):
    """Base of a format name, and what it stands for.

    Attributes:
        bits: of a code.
        options: "group" and "sign", those that may follow.
        group: inputs that share a scale where the name has no group; 0: all inputs of an output.
        codebook: its name among ``CODEBOOK_BITS``; "" for integers.
        activations: how matmuls round activations, see ``QuantiseConfig``.
    """

    bits: int
    options: Collection[Literal["group", "sign"]]
    group: int = 0
    codebook: str = ""
    activations: str = ""


BASES: dict[str, FormatBase] = {
    **{f"int{bits}": FormatBase(bits, ("group", "sign")) for bits in range(2, 9)},
    **{name: FormatBase(int(name[-1]), ("group",), LOOKUP_GROUP, name) for name in ("lut4", "lut3", "nf4")},
    "ternary": FormatBase(2, (), codebook="ternary"),
    "fp8": FormatBase(8, (), codebook="fp8"),
    "mxfp4": FormatBase(4, (), codebook="mxfp4"),
    "w8a8": FormatBase(8, ("group",), activations="int8"),
    "w4a8": FormatBase(4, ("group",), activations="int8"),
    "llm_int8": FormatBase(8, ("group",), activations="outliers"),
}
"""Bases by name."""


@dataclass(frozen=True)
class FormatName:
    """Parsed name of a format; fields as in ``jaxllm.convert.quantise_config.QuantiseConfig``."""

    bits: int
    group: int
    symmetric: bool | None
    codebook: str
    activations: str


def parse_format(name: str) -> FormatName:
    """Parses a name.

    Raises:
        ValueError: an unknown base or option, or one that the base does not take; says which are legal.
    """
    found = [one for one in BASES if name == one or name.startswith(f"{one}_")]
    if not found:
        raise ValueError(
            f"format {name!r}: give one of {', '.join(BASES)}, with a group size if there is one and _asym or _sym if "
            f"it matters: int4_g128, int3_g64_asym, lut4_g64.{closest(name, BASES)}"
        )
    base = BASES[found[0]]
    group, symmetric, given = base.group, None, name[len(found[0]) :].split("_")[1:]
    kinds = []
    for option in given:
        kinds.append("sign" if option in ("asym", "sym") else "group")
        if option in ("asym", "sym"):
            symmetric = option == "sym"
        elif option[:1] == "g" and option[1:].isdecimal() and int(option[1:]) > 0:
            group = int(option[1:])
        else:
            raise ValueError(f"format {name!r}: _{option} is none of _g and a number of inputs, _asym, _sym.")
    legal = {"group": "_gN", "sign": "_asym or _sym"}
    for kind, option in zip(kinds, given, strict=True):
        if kind not in base.options or kinds.count(kind) > 1:
            may = " and ".join(legal[one] for one in base.options) or "no option"
            raise ValueError(f"format {name!r}: {found[0]} takes {may}, each once, and not _{option} here.")
    return FormatName(base.bits, group, symmetric, base.codebook, base.activations)
