"""A tiny model that is served while an adapter of it is trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jaxllm.convert import load_model
from jaxllm.infer import LLM, EngineConfig, Request, SamplingParams
from jaxllm.peft import AdapterConfig
from jaxllm.posttrain.coserve.finetune_run import CoServedRun
from jaxllm.posttrain.coserve.step_slack import SlackScheduler
from jaxllm.train import RunConfig
from tests.train import runs

SIZES = EngineConfig(max_sequences=2, max_batched_tokens=32, max_len=64, decode_steps=2, samplers=("full",))
ROOMY = 10.0
"""Target in which everything fits."""


def adapter_config(folder: Path, name: str, steps: int = 3, **fields: Any) -> RunConfig:
    """Run with an adapter of the model of ``folder``."""
    adapter = fields.pop("adapter", AdapterConfig("lora", rank=2, alpha=8.0))
    given: dict[str, Any] = {"batch_size": 8, "saving": "auto", "every": 2, "keep_last": 9}
    config = runs.run_config(folder, init_from=str(folder / "runs/tiny"), steps=steps, **(given | fields))
    return dataclasses.replace(config, name=name, adapter=adapter)


def served(config: RunConfig | None, base: Path, chunk: int = 6, target: float = ROOMY, **sizes: Any) -> LLM:
    """Engine of the model of ``base``, with a run beside it; None: without one."""
    loaded = load_model(base / "runs/tiny")
    run = None if config is None else CoServedRun(config, loaded, chunk)
    reserved = 0 if run is None else run.device_bytes
    llm = LLM(loaded, dataclasses.replace(SIZES, **sizes), background=False, manifest=None, reserved_bytes=reserved)
    if run is not None:
        run.attach(llm.engine, target)
    return llm


def requests(llm: LLM, count: int = 4, tokens: int = 9) -> list[Request]:
    """Requests of several lengths, half of them sampled."""
    return [
        llm.engine.submit(
            range(1, 4 + 5 * n),
            SamplingParams(max_tokens=tokens, temperature=float(n % 2), seed=n, ignore_eos=True, logprobs=2),
        )
        for n in range(count)
    ]


def answers(found: list[Request]) -> list[tuple[list[int], list[float]]]:
    """Tokens of the requests and their log-probabilities."""
    return [(s.tokens, s.logprobs) for request in found for s in request.sequences]


def serve(llm: LLM, found: list[Request]) -> None:
    """Steps until the requests have ended."""
    while any(s.finish is None for request in found for s in request.sequences):
        llm.engine.step()


def work_of(llm: LLM) -> SlackScheduler:
    """The work beside an engine."""
    work = llm.engine.side_work
    assert isinstance(work, SlackScheduler)
    return work
