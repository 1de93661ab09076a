"""Flash attention: causal grouped-query attention (GQA) that never materialises the S x S scores of all heads."""

from pallas_kernels.flash_attention.api import RESIDUALS as RESIDUALS
from pallas_kernels.flash_attention.api import flash_attention as flash_attention
from pallas_kernels.flash_attention.api import flash_attention_and_lse as flash_attention_and_lse
