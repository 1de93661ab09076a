"""Matrix products of consecutive groups of rows, each with a matrix of its own."""

from pallas_kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
