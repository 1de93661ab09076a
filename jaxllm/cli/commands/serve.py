"""``jaxllm serve``: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxllm.cli.errors import UsageError
from jaxllm.cli.model_loading import load_with_progress
from jaxllm.cli.runtime import use_compilation_cache


def serve(argv: list[str]) -> int:
    """Serve a model: `jaxllm serve MODEL --port 8000`; OpenAI's clients can talk to it."""

    def run(
        model: Annotated[str, tyro.conf.Positional],
        /,
        host: str = "127.0.0.1",
        port: int = 8000,
        name: str | None = None,
        api_key_file: Path | None = None,
        origins: tuple[str, ...] = (),
        sequences: int = 16,
        max_len: int | None = None,
        budget: int = 256,
        policy: Literal["first-come", "priority", "fair", "shortest"] = "first-come",
        tool_parser: str | None = None,
        queue: int = 256,
        max_body: int = 4 * 2**20,
        request_seconds: float | None = None,
        grace_seconds: float = 30.0,
        log_prompts: bool = False,
        dtype: Literal["float32", "bfloat16"] | None = None,
        kv_dtype: Literal["auto", "bfloat16", "int8", "fp8"] = "auto",
        layers: Literal["stacked", "apart"] = "stacked",
        mesh: str | None = None,
    ) -> int:
        """Serves until SIGTERM or Ctrl-C; what is under way then may end.

        Args:
            model: whatever `jaxllm generate` takes.
            host: address to listen on; by default this computer alone can reach it.
            port: 0 for any free one.
            name: of the model, as clients ask for it; the last part of MODEL by default.
            api_key_file: a file with a key a line; requests must carry one. $JAXLLM_API_KEY is one too.
            origins: web pages of these origins may call the server (CORS); none by default.
            sequences: that are worked on at a time.
            max_len: tokens of a sequence, prompt included; by default what the model was trained to read.
            budget: tokens of a step.
            policy: whose turn it is: who came first, who has the highest `priority`, the key that has had least, who is
                likely to end first.
            tool_parser: how the model writes calls: hermes, llama3_json, mistral, mistral_args, deepseek_v3 or
                deepseek_v31; by default as its chat template says.
            queue: continuations that may wait; more are refused with 429.
            max_body: bytes of a request at most.
            request_seconds: that a request may take.
            grace_seconds: that requests have to end in after SIGTERM.
            log_prompts: what is said is logged too.
            dtype: what another library's model is computed in, float32 by default.
            kv_dtype: of cached keys and values: what the model computes in, bfloat16, or eight bits with scales
                (docs/serve/serving.md has what that costs).
            layers: apart: each in arrays of its own, which is faster after compiling for longer.
            mesh: to serve on all devices, such as data=2,tensor=4 (docs/serve/serving.md); one device by default. Then
                sequences and budget are those of each replica.
        """
        try:
            from jaxllm.serve import ServeConfig, backend_factory
            from jaxllm.serve import serve as run_server
        except ModuleNotFoundError as error:
            raise UsageError(f"serving needs {error.name}: pip install 'jaxllm[serve]'.") from None
        use_compilation_cache()
        from jaxllm.infer import LLM, EngineConfig
        from jaxllm.infer.engine.policies import Fair, Priority, Shortest

        config = ServeConfig(
            host=host, port=port, name=name or Path(model).name, api_keys=read_keys(api_key_file), origins=origins,
            queue=queue, max_body=max_body, request_seconds=request_seconds, grace_seconds=grace_seconds,
            log_prompts=log_prompts, tool_parser=tool_parser,
        )  # fmt: skip
        sizes = EngineConfig(sequences=sequences, budget=budget, max_len=max_len, top_logprobs=20, kv_dtype=kv_dtype)
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
        turn = {"priority": Priority(), "fair": Fair(), "shortest": Shortest()}.get(policy)
        run_server(
            config, backend_factory(lambda: LLM(load_with_progress(model, dtype, layers, mesh), sizes, policy=turn))
        )
        return 0

    return tyro.cli(run, args=argv, prog="jaxllm serve")


def read_keys(file: Path | None) -> tuple[str, ...]:
    """Keys of a file and of the environment.

    Raises:
        UsageError: there is no such file, or it has no key.
    """
    keys = [os.environ["JAXLLM_API_KEY"]] if os.environ.get("JAXLLM_API_KEY") else []
    if file is not None:
        try:
            lines = file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file} cannot be read: {error}") from None
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise UsageError(f"{file} has no key; write one a line.")
        keys += found
    return tuple(keys)
