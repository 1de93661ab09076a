"""Grouped low-rank matmul (multi-adapter LoRA): rows of one batch, each with its own adapter's factors, in pages."""

from pallas_kernels.grouped_lora.adapter_tiles import PAGE_RANKS as PAGE_RANKS
from pallas_kernels.grouped_lora.adapter_tiles import AdapterTiles as AdapterTiles
from pallas_kernels.grouped_lora.adapter_tiles import schedule_tiles as schedule_tiles
from pallas_kernels.grouped_lora.api import grouped_lora as grouped_lora
