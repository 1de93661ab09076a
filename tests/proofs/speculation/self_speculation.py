"""Trained self-speculation (S3D) of the real SmolLM2: after a short training, passes are fewer than tokens."""

from __future__ import annotations

import dataclasses
import tempfile

import jax

from jaxllm.convert.load import load_model
from jaxllm.data import load_dataset
from jaxllm.data.dataset import TokenDataset
from jaxllm.infer import LLM, EngineConfig, SamplingParams
from jaxllm.posttrain.frozen.draft_training import DRAFT_FILE, DraftRunConfig, train_draft
from recipes.s3d import s3d_smollm2
from tests.near_ties import first_near_tie
from tests.proofs.harness import proof

WHOLE, FEWER = 150, 3
"""Steps of the recipe, and of a test run, after which nothing is asked of the drafts."""
PROMPT, NEW = 64, 48


def held_out(config: DraftRunConfig, count: int) -> list[list[int]]:
    """Beginnings of rows of the training text that no step has read."""
    loaded = load_model(config.init_from)
    text = load_dataset(config.data, loaded.tokenizer, loaded.template).train
    assert isinstance(text, TokenDataset)
    assert text.rows_per_epoch >= config.data.batch_size * (WHOLE + count), "rows of another epoch have been read"
    return [text.batch_at(WHOLE + number).tokens[0][:PROMPT].tolist() for number in range(count)]


@proof("speculation", cases=(FEWER, WHOLE), sample=1, quick=(FEWER,), counts=("tokens a pass", "accepted of 4"))
def trained_self_speculation(steps: int) -> dict[str, float]:
    """Greedy completions of held-out text, one at a time: tokens are plain decoding's, near-ties apart.

    After the recipe's training a verification gives more than one token, and passes of the model are fewer than tokens.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(s3d_smollm2(), out=folder)
        if steps != WHOLE:  # short rows too
            config = dataclasses.replace(config, steps=steps, data=dataclasses.replace(config.data, seq_len=64))
        file = train_draft(config).directory / DRAFT_FILE
        prompts = held_out(s3d_smollm2(), 8 if steps == WHOLE else 1)
        sizes = EngineConfig(
            max_sequences=1,
            max_batched_tokens=64,
            max_len=PROMPT + NEW,
            buckets=(64,),
            decode_steps=1,
            prefix_cache=False,
            draft_length="fixed",
            samplers=("full",),
            top_logprobs=2,
        )
        params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True, logprobs=2)
        plain = LLM("smollm2", sizes).generate(prompts, params)
        drafting = LLM("smollm2", dataclasses.replace(sizes, speculate=f"self:{file}"))
        before = sum(one.passes for one in drafting.engine.metrics.programs.values())
        drafted = drafting.generate(prompts, params)
    for want, got in zip(plain, drafted, strict=True):
        first_near_tie(want.outputs[0], got.outputs[0])
    metrics = drafting.engine.metrics
    passes = sum(one.passes for one in metrics.programs.values()) - before
    tokens = len(prompts) * NEW / passes
    jax.clear_caches()
    if steps == WHOLE:
        assert metrics.acceptance_length > 1.2, metrics.acceptance_length
        assert tokens > 1.1, tokens
    return {"tokens a pass": tokens, "accepted of 4": metrics.acceptance_length - 1}
