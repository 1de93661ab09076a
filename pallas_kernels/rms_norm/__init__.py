"""RMS norm: division by the root mean square, times a gain."""

from pallas_kernels.rms_norm.api import rms_norm as rms_norm
