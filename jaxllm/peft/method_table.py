"""Method table: ways to adapt a frozen model, one row each. The names are ``AdapterName``."""

from __future__ import annotations

from jaxllm.peft.adapter_method import AdapterMethod
from jaxllm.peft.dora import DORA
from jaxllm.peft.longlora import LONGLORA
from jaxllm.peft.lora import LORA
from jaxllm.peft.lora_ga import LORA_GA
from jaxllm.peft.mixlora import MIXLORA
from jaxllm.peft.pesc import PESC
from jaxllm.peft.prefix import PREFIX
from jaxllm.peft.prompt import PROMPT
from jaxllm.peft.qlora import QLORA
from jaxllm.peft.rslora import RSLORA

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
