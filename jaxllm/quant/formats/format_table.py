"""Format table: formats that a model's dense matrices can be packed in, one row each."""

from __future__ import annotations

from collections.abc import Callable

from jaxllm.models.packed_weight import WeightFormat
from jaxllm.quant.formats.code_groups import CodeGroups
from jaxllm.quant.formats.int8_activations import Int8Activations
from jaxllm.quant.formats.mxfp4 import MXFP4
from jaxllm.quant.formats.nf4 import NF4
from jaxllm.quant.formats.outlier_columns import OutlierColumns
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
}
"""Format by name, made for the dimension that values share scales along: the last one that is summed over, counted from
the end (-2 of a matrix)."""

VOCABULARY_FORMAT = CodeGroups(IntGrid(8), None, -1)
"""Format of the embedding and the head of a model that is rounded to any of these: int8 with a scale for each token's
row. Errors of the head are errors of the logits, and an embedding is looked up from one row."""
