"""Configuration of a quantisation: method, codes, and the layout of the files.

Legend: I inputs, O outputs, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from jaxllm.config import closest
from jaxllm.hub.bitsandbytes import int8_entry, int8_tensors
from jaxllm.hub.compressed_tensors import METHOD, IntScheme, config_entry, packed_tensors
from jaxllm.hub.errors import HubError
from jaxllm.hub.float_codes import value_tensors
from jaxllm.hub.gptq_awq import GPTQ_BITS, awq_tensors, gptq_tensors
from jaxllm.hub.lookup_codes import lookup_entry, lookup_tensors
from jaxllm.quant.codebooks import CodebookGrid
from jaxllm.quant.grids import IntGrid, TernaryGrid
from jaxllm.quant.lookup_tables import TABLES, LearnedScaleGrid
from jaxllm.quant.methods.rounding_table import METHODS

TERNARY = "ternary"
"""Codebook of -1, 0 and 1, which files have as integers of 2 bits."""
CODEBOOK_BITS = {
    "fp8": 8,
    "mxfp4": 4,
    "nf4": 4,
    TERNARY: 2,
    **{name: CodebookGrid(table).bits for name, table in TABLES.items()},
}
"""Codebooks that files can have, and the bits of their codes."""


@dataclass(frozen=True)
class QuantiseConfig:
    """Method and codes of a quantisation.

    Attributes:
        method: row of ``METHODS``.
        bits: bits of a code.
        group: inputs that share a scale; 0: all inputs of an output.
        symmetric: codes without zero points; None: the method's default.
        rows: rows of calibration text.
        length: tokens of a row.
        codebook: row of ``CODEBOOK_BITS`` in place of integer codes; bits and symmetric are then its own, and the
            group of fp8 and mxfp4.
        layout: layout of the files: compressed-tensors, gptq or awq. Those of lookup tables have a layout of their own,
            and so does llm_int8 (bitsandbytes).
        activations: "int8": matmuls round activations to int8; "outliers": all but outlier inputs (LLM.int8()).
        budget: mean of bits over weights, which are given to layers by their errors; 0: all have ``bits``.
        only: "experts": the matrices of a mixture's experts alone (MoQE, arXiv:2310.02410); "": all matrices of blocks.
    """

    method: str = "gptq"
    bits: int = 4
    group: int = 128
    symmetric: bool | None = None
    rows: int = 64
    length: int = 512
    codebook: str = ""
    layout: str = METHOD
    activations: str = ""
    budget: float = 0
    only: str = ""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise HubError(f"method {self.method!r}: give one of {', '.join(METHODS)}.{closest(self.method, METHODS)}")
        if not 2 <= self.bits <= 8 or self.group < 0 or self.rows < 1 or self.length < 2:
            raise HubError(
                "legal are bits of 2 to 8, groups of 0 or more inputs, rows of 1 or more, lengths of 2 or more."
            )

        self._check_layout()
        self._check_activations()
        if self.only not in ("", "experts"):
            raise HubError(f"only = {self.only!r}: give experts, or nothing for all matrices of blocks.")
        if self.only and (self.codebook not in ("", TERNARY) or self.layout != METHOD or METHODS[self.method].smooths):
            raise HubError(
                f"experts alone: legal are integer codes, the layout {METHOD}, and methods that leave other weights as "
                f"they are: {', '.join(name for name, row in METHODS.items() if not row.smooths)}."
            )
        if self.budget and (self.codebook or self.activations or self.layout != METHOD or self.budget < 2):
            raise HubError(
                f"a budget of {self.budget:g} bits: legal are 2 or more, with integer codes, activations as they are, "
                f"and the layout {METHOD}."
            )

    def _check_activations(self) -> None:
        if self.activations not in ("", "int8", "outliers"):
            raise HubError(f"activations {self.activations!r}: give int8, outliers, or none.")
        whole = self.activations == "outliers" and (self.bits, self.group) != (8, 0)
        if self.activations and (
            self.bits not in (4, 8) or self.codebook or self.layout != METHOD or whole or self.method == "hqq"
        ):
            raise HubError(
                f"activations in int8 are multiplied with symmetric integers of 8 or 4 bits (outliers: of 8, one scale "
                f"for each output) in the layout {METHOD}; hqq has none."
            )

    def _check_layout(self) -> None:
        if self.codebook not in ("", *CODEBOOK_BITS):
            raise HubError(f"codebook {self.codebook!r}: give one of {', '.join(CODEBOOK_BITS)}, or none.")
        if self.codebook == TERNARY and (self.bits, self.group, self.symmetric) not in ((2, 0, None), (2, 0, True)):
            raise HubError(
                "ternary codes have 2 bits, and one scale for all inputs of an output: give bits 2, group 0."
            )
        if self.method.endswith("learned_scales") and (self.codebook == "mxfp4" or self.symmetric is False):
            raise HubError(f"{self.method} wants free scales and no zero points: lut4, lut3, nf4, fp8 or int4_sym.")
        if self.codebook and self.method == "hqq":
            raise HubError(f"hqq moves zero points, which {self.codebook} does not have; choose int4_asym or rtn.")
        legal = {METHOD: tuple(range(2, 9)), "gptq": GPTQ_BITS, "awq": (4,)}
        if self.layout not in legal:
            raise HubError(f"layout {self.layout!r}: give one of {', '.join(legal)}.{closest(self.layout, legal)}")
        if self.layout != METHOD and (self.codebook or self.bits not in legal[self.layout]):
            named = ", ".join(map(str, legal[self.layout]))
            raise HubError(f"layout {self.layout} has integer codes of {named} bits; choose {METHOD}, which has all.")

    def scale_dtype(self, dtype: str) -> str:
        """Dtype of stored scales, in a model with scales in ``dtype`` where the layout leaves it open."""
        return "float32" if self.activations == "outliers" else dtype

    def grid(self, scale_dtype: str, bits: int | None = None) -> IntGrid | CodebookGrid:
        """Grid of the codes, whose scales are stored in a dtype; ``bits`` in place of the config's."""
        if self.codebook == TERNARY:
            return TernaryGrid(scale_dtype=scale_dtype)
        if self.codebook in TABLES:
            return LearnedScaleGrid(TABLES[self.codebook], scale_dtype)
        if self.codebook:
            return CodebookGrid(self.codebook, scale_dtype)
        method = METHODS[self.method]
        symmetric = method.symmetric or bool(self.activations) if self.symmetric is None else self.symmetric
        return IntGrid(bits or self.bits, symmetric, scale_dtype)

    @property
    def inputs_of_group(self) -> int | None:
        """Inputs that share a scale; None: all inputs of an output."""
        return {"fp8": None, "mxfp4": 32}.get(self.codebook, self.group or None)

    @property
    def is_lookup(self) -> bool:
        """Whether codes are looked up in a table, in the layout of ``jaxllm.hub.lookup_codes``."""
        return self.codebook in ("nf4", *TABLES)

    @property
    def stores_zeros(self) -> bool:
        """Whether codes have zero points that vary."""
        return self.grid("float32").stored > 1

    def tensors(
        self,
        name: str,
        codes: UInt8[np.ndarray, "O I"],
        scale: Float[np.ndarray, "O G"],
        zero: Float[np.ndarray, "O G"],
        bits: int | None = None,
    ) -> dict[str, np.ndarray]:
        """Tensors of a file for the matrix called ``name``; ``bits`` in place of the config's."""
        if self.activations == "outliers":
            return int8_tensors(name.removesuffix(".weight"), codes, scale)
        if self.is_lookup:
            return lookup_tensors(name, codes, scale, CODEBOOK_BITS[self.codebook])
        if self.values:
            return value_tensors(name, self.values, codes, scale)
        if self.layout == METHOD:
            return packed_tensors(name, codes, scale, zero if self.stores_zeros else None, bits or self.bits)
        stem = name.removesuffix(".weight")
        if self.layout == "awq":
            return awq_tensors(stem, codes, scale, zero)
        return gptq_tensors(stem, codes, scale, zero, self.bits)

    @property
    def values(self) -> str:
        """Values that files have in place of packed codes: "fp8", "mxfp4", "int8" (w8a8), or none."""
        if self.codebook == TERNARY:
            return ""
        return "int8" if self.activations and self.bits == 8 and not self.group else self.codebook

    def entry(
        self, linears: Sequence[str], bits: Mapping[str, int] | None = None, kept: Sequence[str] = ()
    ) -> dict[str, Any]:
        """``quantization_config`` of ``config.json``.

        Args:
            linears: names of all linear layers.
            bits: bits of layers that were given their own, by name.
            kept: linear layers of blocks that are not quantised.
        """
        group = self.inputs_of_group
        if self.is_lookup:
            return lookup_entry(TABLES.get(self.codebook, self.codebook), group)
        if self.layout != METHOD:
            own = {"checkpoint_format": "gptq", "desc_act": False, "sym": not self.stores_zeros}
            if self.layout == "awq":
                own = {"version": "gemm", "zero_point": True, "modules_to_not_convert": None}
            return {"quant_method": self.layout, "bits": self.bits, "group_size": group or -1, **own}
        ignore = [n for n in linears if n == "lm_head" or n.endswith(("router", "mlp.gate", "moe.gate"))]
        ignore = [*ignore, *(["lm_head"] * ("lm_head" not in ignore)), *(n for n in kept if n not in ignore)]
        if self.activations == "outliers":
            return int8_entry(ignore)
        scheme = IntScheme(self.bits, group, not self.stores_zeros, activations=bool(self.activations))
        layers: dict[int, list[str]] = {}
        for name, count in (bits or {}).items():
            layers.setdefault(count, []).append(name)
        schemes = [replace(scheme, bits=n, targets=tuple(sorted(names))) for n, names in sorted(layers.items())]
        return config_entry(schemes or [scheme], ignore, self.values)
