"""Division by the root of the mean square."""

from pallas_kernels.rms_norm.api import rms_norm as rms_norm
