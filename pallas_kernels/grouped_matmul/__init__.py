"""Grouped matmul: consecutive groups of rows, each multiplied by its own matrix."""

from pallas_kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
