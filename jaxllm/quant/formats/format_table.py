"""Format table: formats that a model's matrices can be packed in, one row each; and formats of experts alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxllm.config import closest
from jaxllm.models.packed_weight import WeightFormat
from jaxllm.quant.formats.code_groups import CodeGroups
from jaxllm.quant.formats.int8_activations import Int8Activations
from jaxllm.quant.formats.mxfp4 import MXFP4
from jaxllm.quant.formats.nf4 import NF4
from jaxllm.quant.formats.outlier_columns import OutlierColumns
from jaxllm.quant.formats.ternary_dictionary import TernaryDictionary
from jaxllm.quant.grids import IntGrid
from jaxllm.quant.lookup_tables import TABLES, LearnedScaleGrid

WEIGHT_FORMATS: dict[str, Callable[[int], WeightFormat]] = {
    "mxfp4": MXFP4,
    "nf4": NF4,
    "lut4": lambda axis: CodeGroups(LearnedScaleGrid(TABLES["lut4"]), 64, axis),
    "lut3": lambda axis: CodeGroups(LearnedScaleGrid(TABLES["lut3"]), 64, axis),
    "w8a8": lambda axis: Int8Activations(IntGrid(8), None, axis),
    "w4a8": lambda axis: Int8Activations(IntGrid(4), 32, axis),
    "llm_int8": lambda axis: OutlierColumns(IntGrid(8), None, axis),
    "int8": lambda axis: CodeGroups(IntGrid(8), 32, axis),
    "int4": lambda axis: CodeGroups(IntGrid(4), 32, axis),
    "int3": lambda axis: CodeGroups(IntGrid(3), 64, axis),
    "int2": lambda axis: CodeGroups(IntGrid(2), 64, axis),
}
"""Format by name, made for the dimension that values share scales along: the last one that is summed over, counted from
the end (-2 of a matrix)."""

VOCABULARY_FORMAT = CodeGroups(IntGrid(8), None, -1)
"""Format of the embedding and the head of a model that is rounded to any of these: int8 with a scale for each token's
row. Errors of the head are errors of the logits, and an embedding is looked up from one row."""

EXPERT_FORMATS: dict[str, Callable[[int], WeightFormat]] = {"ternary": lambda axis: TernaryDictionary()}
"""Formats of the matrices of experts and of no others."""

EXPERTS_ONLY = "experts_"
"""Beginning of the names of formats that only the experts of a mixture are packed in (MoQE, arXiv:2310.02410)."""


class WeightPacking(NamedTuple):
    """Matrices and format that a name of ``--weights`` packs.

    Attributes:
        make: the format, for the last dimension that is summed over.
        experts_only: the experts' matrices alone; else all matrices, embedding and head.
    """

    make: Callable[[int], WeightFormat]
    experts_only: bool

    def packs(self, path: str) -> bool:
        """Whether the matrix at a path of a model's parameters is packed."""
        return not self.experts_only or "/experts/" in path


def is_packing(name: str) -> bool:
    """Whether a name is a row of ``WEIGHT_FORMATS``, or one of experts alone: ``experts_int2``."""
    return name in packing_names()


def packing_names() -> list[str]:
    """Names that ``packing`` takes."""
    return [*WEIGHT_FORMATS, *(EXPERTS_ONLY + name for name in (*WEIGHT_FORMATS, *EXPERT_FORMATS))]


def packing_choices() -> list[str]:
    """The same for people, with one name for the formats that experts alone can have too."""
    return [f"{EXPERTS_ONLY}FORMAT", *(EXPERTS_ONLY + name for name in EXPERT_FORMATS), *WEIGHT_FORMATS]


def packing(name: str) -> WeightPacking:
    """Matrices and format that a name packs.

    Raises:
        ValueError: there is no such name; lists those that there are.
    """
    if not is_packing(name):
        legal = ", ".join(packing_choices())
        raise ValueError(f"weight format {name!r}: give one of {legal}.{closest(name, packing_names())}")
    if name in WEIGHT_FORMATS:
        return WeightPacking(WEIGHT_FORMATS[name], experts_only=False)
    return WeightPacking((WEIGHT_FORMATS | EXPERT_FORMATS)[name.removeprefix(EXPERTS_ONLY)], experts_only=True)
