"""Matmul with ternary matrices in a dictionary code, which is decoded within it."""

from pallas_kernels.ternary_matmul.api import ternary_matmul as ternary_matmul
from pallas_kernels.ternary_matmul.codewords import TernaryCode as TernaryCode
