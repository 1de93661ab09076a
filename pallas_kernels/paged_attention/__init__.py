"""Paged attention: a ragged batch of prefill chunks and decode tokens attends to a paged KV cache, and writes to it."""

from pallas_kernels.paged_attention import channel_formats as channel_formats
from pallas_kernels.paged_attention import grouped_formats as grouped_formats
from pallas_kernels.paged_attention.api import paged_attention as paged_attention
from pallas_kernels.paged_attention.pages import PageFormat as PageFormat
from pallas_kernels.paged_attention.pages import PagePool as PagePool
from pallas_kernels.paged_attention.pages import Slots as Slots
from pallas_kernels.paged_attention.shadow import shadow_format as shadow_format
from pallas_kernels.paged_attention.tree_mask import TreeMask as TreeMask
