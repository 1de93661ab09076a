"""Quantisation: formats of packed weights, and packing the parameters of a model in them."""

from jaxllm.lazy import lazy_exports

__getattr__, __all__ = lazy_exports(
    __name__,
    {
        "jaxllm.quant.formats.format_table": ("WEIGHT_FORMATS", "is_packing", "packing_choices", "packing_names"),
        "jaxllm.quant.packing": ("describe_packed", "pack_params", "packed_shapes"),
    },
)
