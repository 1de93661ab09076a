"""Configuration of a quantisation: method, codes, and the layout of the files.

Legend: I inputs, O outputs, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from jaxllm.config import closest
from jaxllm.hub.compressed_tensors import METHOD, IntScheme, config_entry, packed_tensors
from jaxllm.hub.errors import HubError
from jaxllm.hub.float_codes import value_tensors
from jaxllm.hub.gptq_awq import GPTQ_BITS, awq_tensors, gptq_tensors
from jaxllm.quant.codebooks import CodebookGrid
from jaxllm.quant.grids import IntGrid
from jaxllm.quant.methods.rounding_table import METHODS

CODEBOOK_BITS = {"fp8": 8, "mxfp4": 4}
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
        codebook: "fp8" or "mxfp4" in place of integer codes; bits, group and symmetric are then its own.
        layout: layout of the files: compressed-tensors, gptq or awq.
    """

    method: str = "gptq"
    bits: int = 4
    group: int = 128
    symmetric: bool | None = None
    rows: int = 64
    length: int = 512
    codebook: str = ""
    layout: str = METHOD

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise HubError(f"method {self.method!r}: give one of {', '.join(METHODS)}.{closest(self.method, METHODS)}")
        if not 2 <= self.bits <= 8 or self.group < 0 or self.rows < 1 or self.length < 2:
            raise HubError(
                "legal are bits of 2 to 8, groups of 0 or more inputs, rows of 1 or more, lengths of 2 or more."
            )

        self._check_layout()

    def _check_layout(self) -> None:
        if self.codebook not in ("", *CODEBOOK_BITS):
            raise HubError(f"codebook {self.codebook!r}: give one of {', '.join(CODEBOOK_BITS)}, or none.")
        if self.codebook and self.method == "hqq":
            raise HubError(f"hqq moves zero points, which {self.codebook} does not have; choose int4_asym or rtn.")
        legal = {METHOD: tuple(range(2, 9)), "gptq": GPTQ_BITS, "awq": (4,)}
        if self.layout not in legal:
            raise HubError(f"layout {self.layout!r}: give one of {', '.join(legal)}.{closest(self.layout, legal)}")
        if self.layout != METHOD and (self.codebook or self.bits not in legal[self.layout]):
            named = ", ".join(map(str, legal[self.layout]))
            raise HubError(f"layout {self.layout} has integer codes of {named} bits; choose {METHOD}, which has all.")

    def grid(self, scale_dtype: str) -> IntGrid | CodebookGrid:
        """Grid of the codes, whose scales are stored in a dtype."""
        if self.codebook:
            return CodebookGrid(self.codebook, scale_dtype)
        method = METHODS[self.method]
        symmetric = method.symmetric if self.symmetric is None else self.symmetric
        return IntGrid(self.bits, symmetric, scale_dtype)

    @property
    def inputs_of_group(self) -> int | None:
        """Inputs that share a scale; None: all inputs of an output."""
        return {"fp8": None, "mxfp4": 32}[self.codebook] if self.codebook else self.group or None

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
    ) -> dict[str, np.ndarray]:
        """Tensors of a file for the matrix called ``name``."""
        if self.codebook:
            return value_tensors(name, self.codebook, codes, scale)
        if self.layout == METHOD:
            return packed_tensors(name, codes, scale, zero if self.stores_zeros else None, self.bits)
        stem = name.removesuffix(".weight")
        if self.layout == "awq":
            return awq_tensors(stem, codes, scale, zero)
        return gptq_tensors(stem, codes, scale, zero, self.bits)

    def entry(self, linears: Sequence[str]) -> dict[str, Any]:
        """``quantization_config`` of ``config.json``.

        Args:
            linears: names of all linear layers.
        """
        group = self.inputs_of_group
        if self.layout != METHOD:
            own = {"checkpoint_format": "gptq", "desc_act": False, "sym": not self.stores_zeros}
            if self.layout == "awq":
                own = {"version": "gemm", "zero_point": True, "modules_to_not_convert": None}
            return {"quant_method": self.layout, "bits": self.bits, "group_size": group or -1, **own}
        ignore = [n for n in linears if n == "lm_head" or n.endswith(("router", "mlp.gate", "moe.gate"))]
        scheme = IntScheme(self.bits, group, not self.stores_zeros)
        return config_entry(scheme, [*ignore, *(["lm_head"] * ("lm_head" not in ignore))], self.codebook)
