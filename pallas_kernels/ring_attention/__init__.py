"""Ring attention (context parallelism): the sequence is split over devices; keys and values rotate around a ring."""

from pallas_kernels.ring_attention.api import ring_attention as ring_attention
from pallas_kernels.ring_attention.layout import Layout as Layout
from pallas_kernels.ring_attention.layout import order as order
from pallas_kernels.ring_attention.layout import places as places
