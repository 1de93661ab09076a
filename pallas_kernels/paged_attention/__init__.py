"""Attention of a flat batch of prompts' pieces and decoded tokens to paged keys and values, which it writes too."""

from pallas_kernels.paged_attention.api import paged_attention as paged_attention
from pallas_kernels.paged_attention.pages import PageFormat as PageFormat
from pallas_kernels.paged_attention.pages import PagePool as PagePool
from pallas_kernels.paged_attention.pages import Slots as Slots
