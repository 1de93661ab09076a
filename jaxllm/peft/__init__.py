"""Adapters: LoRA and its family, trained beside a frozen base, in the file format of the library ``peft``."""

from jaxllm.lazy import lazy_exports

__getattr__, __all__ = lazy_exports(
    __name__,
    {
        "jaxllm.peft.adapter": ("Adapter", "AdapterError", "adapted_params", "check_adapter", "merged_params"),
        "jaxllm.peft.adapted_model": ("merge_adapters", "start_params", "with_adapter"),
        "jaxllm.peft.adapter_method": ("AdapterConfig",),
        "jaxllm.peft.methods.dora": ("DoraWeight",),
        "jaxllm.peft.low_rank_factors": ("LoraWeight", "LowRank"),
        "jaxllm.peft.peft_files": ("read_peft", "write_peft"),
    },
)
