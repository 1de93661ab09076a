"""The ``jaxllm`` command.

Each command is a function of typed arguments; ``train`` takes a recipe and lets any field of its configuration be
overridden. The commands on models, data and checkpoints are in files of their own.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jaxllm import model_cli
from jaxllm.command import UsageError, guarded, processes, use_compilation_cache
from jaxllm.config import closest

if TYPE_CHECKING:
    from jaxllm.train import RunConfig

Recipe = Callable[[], "RunConfig"]
RECIPES = "jaxllm.recipes"


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
        print("`--precision NAME` sets those of a precision together: docs/precision.md.")
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
    argv, default = with_precision(argv, default)
    check_settings(argv, default)
    return tyro.cli(
        tyro.conf.AvoidSubcommands[RunConfig], default=default, args=argv, prog=prog, description=recipe.__doc__
    )


def with_precision(argv: list[str], default: RunConfig) -> tuple[list[str], RunConfig]:
    """``--precision NAME`` taken out of ``argv``, and the run in it: the settings that follow are on top of it.

    Raises:
        UsageError: it has no name.
        ConfigError: there is none of that name.
    """
    from jaxllm.train.precision import in_precision

    rest, words = [], iter(argv)
    for word in words:
        if word != "--precision" and not word.startswith("--precision="):
            rest.append(word)
            continue
        name = word.partition("=")[2] or next(words, "")
        if not name:
            raise UsageError("--precision needs a name, such as bf16.")
        default = in_precision(default, name)
    return rest, default


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


def data(argv: list[str]) -> int:
    """Look into data, tokenize, pack and clean it: `jaxllm data COMMAND FILES`."""
    from jaxllm.data_cli import data as run

    return run(argv)


def checkpoint(argv: list[str]) -> int:
    """List, check, compare, convert, remove checkpoints: `jaxllm checkpoint COMMAND WHERE`."""
    from jaxllm.checkpoint_cli import checkpoint as run

    return run(argv)


def pipeline(argv: list[str]) -> int:
    """Show pipeline schedules: `jaxllm pipeline 1f1b --stages 4 --micro-batches 8`."""
    from jaxllm.pipeline_cli import pipeline as run

    return run(argv)


def compile(argv: list[str]) -> int:
    """Compile a step for a pod that is not here: `jaxllm compile RECIPE --on v6e:8x8`."""
    from jaxllm.plan_cli import compile as run

    return run(argv)


def launch(argv: list[str]) -> int:
    """Start processes and restart them: `jaxllm launch local -n 4 -- train RECIPE`."""
    from jaxllm.launch_cli import launch as run

    return run(argv)


def report(argv: list[str]) -> int:
    """Show a run as one HTML page, or as text: `jaxllm report RUN [--text]`."""
    from jaxllm.report_cli import report as run

    return run(argv)


def compare(argv: list[str]) -> int:
    """Overlay runs on one HTML page: `jaxllm compare RUN RUN ...`."""
    from jaxllm.report_cli import compare as run

    return run(argv)


def plan(argv: list[str]) -> int:
    """Rank layouts of a run by predicted time: `jaxllm plan RECIPE --on v6e:8x8`."""
    from jaxllm.plan_cli import plan as run

    return run(argv)


def roofline(argv: list[str]) -> int:
    """Show what bounds each operation: `jaxllm roofline RECIPE --on v6e:2x4`."""
    from jaxllm.roofline_cli import roofline as run

    return run(argv)


def size(argv: list[str]) -> int:
    """Size a model and its training for a budget: `jaxllm size --flops 1e21`."""
    from jaxllm.size_cli import size as run

    return run(argv)


def serve(argv: list[str]) -> int:
    """Serve a model to OpenAI's clients: `jaxllm serve MODEL --port 8000`."""
    from jaxllm.serve_cli import serve as run

    return run(argv)


def bench(argv: list[str]) -> int:
    """Measure how fast a model writes: `jaxllm bench MODEL`; or a server: `bench serve`."""
    if argv[:1] == ["serve"]:
        from jaxllm.serve_cli import bench_serve

        return bench_serve(argv[1:])
    return model_cli.bench(argv)


COMMANDS: dict[str, Any] = {
    "train": train,
    "launch": launch,
    "shard": shard,
    "size": size,
    "plan": plan,
    "compile": compile,
    "roofline": roofline,
    "pipeline": pipeline,
    "generate": model_cli.generate,
    "chat": model_cli.chat,
    "serve": serve,
    "convert": model_cli.convert,
    "inspect": model_cli.inspect,
    "eval": model_cli.evaluate,
    "bench": bench,
    "reproduce": reproduce,
    "report": report,
    "compare": compare,
    "data": data,
    "checkpoint": checkpoint,
}

if __name__ == "__main__":
    raise SystemExit(main())
