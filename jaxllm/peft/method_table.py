"""Method table: ways to adapt a frozen model, one row each. The names are ``AdapterName``."""

from __future__ import annotations

from jaxllm.peft.adapter_method import AdapterMethod
from jaxllm.peft.methods.dora import DORA
from jaxllm.peft.methods.longlora import LONGLORA
from jaxllm.peft.methods.lora import LORA
from jaxllm.peft.methods.lora_ga import LORA_GA
from jaxllm.peft.methods.mixlora import MIXLORA
from jaxllm.peft.methods.pesc import PESC
from jaxllm.peft.methods.prefix import PREFIX
from jaxllm.peft.methods.prompt import PROMPT
from jaxllm.peft.methods.qlora import QLORA
from jaxllm.peft.methods.rslora import RSLORA

ADAPTER_METHODS: dict[str, AdapterMethod] = {
    "lora": LORA,
    "rslora": RSLORA,
    "dora": DORA,
    "qlora": QLORA,
    "lora_ga": LORA_GA,
    "longlora": LONGLORA,
    "prefix": PREFIX,
    "prompt": PROMPT,
    "mixlora": MIXLORA,
    "pesc": PESC,
}
