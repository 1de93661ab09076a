"""Packed matmul: rows times a matrix in codes of few bits, dequantised on chip."""

from pallas_kernels.packed_matmul.api import packed_matmul as packed_matmul
from pallas_kernels.packed_matmul.codes import BITS as BITS
from pallas_kernels.packed_matmul.codes import PackedCodes as PackedCodes
