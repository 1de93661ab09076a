"""Command table of ``jaxllm``: one row per command. A command's module is imported when the command runs."""

from __future__ import annotations

import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """Command of ``jaxllm``.

    Attributes:
        module: name of its module in ``jaxllm.cli.commands``.
        function: name of the function there that takes the arguments and returns the exit status.
        summary: line in ``jaxllm --help``; the first line of the function's docstring.
    """

    module: str
    function: str
    summary: str

    def __call__(self, argv: list[str]) -> int:
        """Runs the command and returns its exit status."""
        return getattr(importlib.import_module(f"jaxllm.cli.commands.{self.module}"), self.function)(argv)


COMMANDS = {
    "train": Command(
        "train",
        "train",
        "Train a model: `jaxllm train RECIPE [--setting value ...]`; resumes a stopped run.",
    ),
    "launch": Command(
        "launch",
        "launch",
        "Launch processes and restart them: `jaxllm launch local -n 4 -- train RECIPE`.",
    ),
    "shard": Command(
        "shard",
        "shard",
        "Show how a run is sharded: `jaxllm shard RECIPE --mesh fsdp=4,tensor=2`.",
    ),
    "size": Command(
        "size",
        "size",
        "Size a model and its training for a budget: `jaxllm size --flops 1e21`.",
    ),
    "plan": Command(
        "plan",
        "plan",
        "Rank parallel layouts by predicted step time: `jaxllm plan RECIPE --on v6e:8x8`.",
    ),
    "compile": Command(
        "compile",
        "compile",
        "Compile the train step ahead of time: `jaxllm compile RECIPE --on v6e:8x8`.",
    ),
    "roofline": Command(
        "roofline",
        "roofline",
        "Show what bounds each operation: `jaxllm roofline RECIPE --on v6e:2x4`.",
    ),
    "pipeline": Command(
        "pipeline",
        "pipeline",
        "Show pipeline schedules: `jaxllm pipeline 1f1b --stages 4 --micro-batches 8`.",
    ),
    "generate": Command(
        "generate",
        "generate",
        "Complete a prompt and stream the completion: `jaxllm generate MODEL --prompt TEXT`.",
    ),
    "chat": Command(
        "chat",
        "chat",
        "Chat with a model: `jaxllm chat MODEL`, for example `jaxllm chat smollm2`.",
    ),
    "serve": Command(
        "serve",
        "serve",
        "Serve a model to OpenAI clients: `jaxllm serve MODEL --port 8000`.",
    ),
    "convert": Command(
        "convert",
        "convert",
        "Convert a model to another format: `jaxllm convert SOURCE OUT --to hf|jaxllm`.",
    ),
    "inspect": Command(
        "inspect",
        "inspect",
        "Inspect a model's files: architecture, tensors, tokenizer: `jaxllm inspect MODEL`.",
    ),
    "eval": Command(
        "eval",
        "evaluate",
        "Evaluate a model: bits per byte on its held-out text, or tasks: `jaxllm eval MODEL`.",
    ),
    "bench": Command(
        "bench",
        "bench",
        "Measure decode throughput: `jaxllm bench MODEL`; or load-test a server: `bench serve`.",
    ),
    "reproduce": Command(
        "reproduce",
        "reproduce",
        "Rerun the configuration of a receipt and compare losses: `jaxllm reproduce RECEIPT`.",
    ),
    "report": Command(
        "report",
        "report",
        "Report on a run as one HTML page, or as text: `jaxllm report RUN [--text]`.",
    ),
    "compare": Command(
        "report",
        "compare",
        "Compare runs on one HTML page: `jaxllm compare RUN RUN ...`.",
    ),
    "data": Command(
        "data",
        "data",
        "Inspect, tokenize, pack and clean data: `jaxllm data COMMAND FILES`.",
    ),
    "checkpoint": Command(
        "checkpoint",
        "checkpoint",
        "List, verify, compare, reshard, remove checkpoints: `jaxllm checkpoint COMMAND WHERE`.",
    ),
}
"""The commands in the order of ``jaxllm --help``."""
