"""Command table of ``jaxllm``: one row per command. A command's module is imported when the command runs."""

from __future__ import annotations

import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """Command of ``jaxllm``.

    Attributes:
        module: dotted name of its module.
        function: name of the function there that takes the arguments and returns the exit status.
        summary: line in ``jaxllm --help``; the first line of the function's docstring.
    """

    module: str
    function: str
    summary: str

    def __call__(self, argv: list[str]) -> int:
        """Runs the command and returns its exit status."""
        return getattr(importlib.import_module(self.module), self.function)(argv)


COMMANDS = {
    "train": Command(
        "jaxllm.cli.commands.train",
        "train",
        "Train a model: `jaxllm train RECIPE [--setting value ...]`; resumes a stopped run.",
    ),
    "launch": Command(
        "jaxllm.cli.commands.launch",
        "launch",
        "Launch processes and restart them: `jaxllm launch local -n 4 -- train RECIPE`.",
    ),
    "shard": Command(
        "jaxllm.cli.commands.planning.shard",
        "shard",
        "Show how a run is sharded: `jaxllm shard RECIPE --mesh fsdp=4,tensor=2`.",
    ),
    "size": Command(
        "jaxllm.cli.commands.planning.size",
        "size",
        "Size a model and its training for a budget: `jaxllm size --flops 1e21`.",
    ),
    "plan": Command(
        "jaxllm.cli.commands.planning.plan",
        "plan",
        "Rank parallel layouts by predicted step time: `jaxllm plan RECIPE --on v6e:8x8`.",
    ),
    "compile": Command(
        "jaxllm.cli.commands.planning.compile",
        "compile",
        "Compile the train step ahead of time: `jaxllm compile RECIPE --on v6e:8x8`.",
    ),
    "roofline": Command(
        "jaxllm.cli.commands.planning.roofline",
        "roofline",
        "Show what bounds each operation: `jaxllm roofline RECIPE --on v6e:2x4`.",
    ),
    "simulate": Command(
        "jaxllm.cli.commands.planning.simulate",
        "simulate",
        "Simulate serving on devices elsewhere: `jaxllm simulate MODEL --on h200:8`.",
    ),
    "doctor": Command(
        "jaxllm.cli.commands.doctor",
        "doctor",
        "Show devices, versions and kernels, which are checked here: `jaxllm doctor`.",
    ),
    "tune": Command(
        "jaxllm.cli.commands.tune",
        "tune",
        "Tune kernels with learned cost models: `jaxllm tune flash_attention|matmul|program`.",
    ),
    "pipeline": Command(
        "jaxllm.cli.commands.planning.pipeline",
        "pipeline",
        "Show pipeline schedules: `jaxllm pipeline 1f1b --stages 4 --micro-batches 8`.",
    ),
    "generate": Command(
        "jaxllm.cli.commands.generate",
        "generate",
        "Complete a prompt and stream the completion: `jaxllm generate MODEL --prompt TEXT`.",
    ),
    "chat": Command(
        "jaxllm.cli.commands.chat",
        "chat",
        "Chat with a model: `jaxllm chat MODEL`, for example `jaxllm chat smollm2`.",
    ),
    "serve": Command(
        "jaxllm.cli.commands.serve",
        "serve",
        "Serve a model to OpenAI clients: `jaxllm serve MODEL --port 8000`.",
    ),
    "route": Command(
        "jaxllm.cli.commands.route",
        "route",
        "Configure a gateway over several servers: `jaxllm route envoy --replicas URL,URL`.",
    ),
    "convert": Command(
        "jaxllm.cli.commands.convert",
        "convert",
        "Convert a model to another format: `jaxllm convert SOURCE OUT --to hf|jaxllm|peft`.",
    ),
    "adapters": Command(
        "jaxllm.cli.commands.adapters",
        "adapters",
        "List, compare, add and merge adapters: `jaxllm adapters ls|diff|add|merge`.",
    ),
    "quantise": Command(
        "jaxllm.cli.commands.quantise",
        "quantise",
        "Round a model's matrices to few bits: `jaxllm quantise SOURCE OUT --format int4_g128`.",
    ),
    "inspect": Command(
        "jaxllm.cli.commands.inspect",
        "inspect",
        "Inspect a model's files: architecture, tensors, tokenizer: `jaxllm inspect MODEL`.",
    ),
    "eval": Command(
        "jaxllm.cli.commands.eval",
        "evaluate",
        "Evaluate a model: bits per byte on its held-out text, or tasks: `jaxllm eval MODEL`.",
    ),
    "bench": Command(
        "jaxllm.cli.commands.bench",
        "bench",
        "Measure decode: `jaxllm bench MODEL`; a server: `bench serve`; links: `bench --links`.",
    ),
    "reproduce": Command(
        "jaxllm.cli.commands.reproduce",
        "reproduce",
        "Rerun the configuration of a receipt and compare losses: `jaxllm reproduce RECEIPT`.",
    ),
    "report": Command(
        "jaxllm.cli.commands.report",
        "report",
        "Report on a run as one HTML page, or as text: `jaxllm report RUN [--text]`.",
    ),
    "compare": Command(
        "jaxllm.cli.commands.report",
        "compare",
        "Compare runs on one HTML page: `jaxllm compare RUN RUN ...`.",
    ),
    "data": Command(
        "jaxllm.cli.commands.data",
        "data",
        "Inspect, tokenize, pack, clean and mix data: `jaxllm data COMMAND FILES`.",
    ),
    "checkpoint": Command(
        "jaxllm.cli.commands.checkpoint",
        "checkpoint",
        "List, verify, compare, reshard, remove checkpoints: `jaxllm checkpoint COMMAND WHERE`.",
    ),
}
"""The commands in the order of ``jaxllm --help``."""
