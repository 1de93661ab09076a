"""Recipe arguments: finding a recipe by name and overriding fields of its ``RunConfig`` from the command line."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.metadata
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from jaxllm.cli.command_parser import with_readable_settings
from jaxllm.cli.deprecated_options import print_rename
from jaxllm.cli.errors import UsageError, guarded
from jaxllm.cli.memory_budget import check_hardware_used, fitted_here, without_budget, without_hardware
from jaxllm.cli.runtime import processes, use_compilation_cache
from jaxllm.config import closest, new_field_names

if TYPE_CHECKING:
    from jaxllm.train import RunConfig, TrainResult
    from jaxllm.train.recovery.layout_switch import LayoutSwitch

Recipe = Callable[[], "RunConfig"]
ELASTIC = "--elastic"
"""Option of an elastic run, which ``jaxllm launch`` reads too."""
RECIPES = "jaxllm.recipes"
"""The entry-point group in which installed recipes are registered."""


def configure(recipe: Recipe, argv: list[str], prog: str | None = None) -> RunConfig:
    """Configuration that ``recipe`` returns, with the settings of ``argv`` applied.

    Raises:
        UsageError: the recipe does not return a RunConfig, or a setting is unknown.
    """
    from jaxllm.train import RunConfig

    default = recipe()
    if not isinstance(default, RunConfig):
        what = getattr(recipe, "__name__", recipe)
        raise UsageError(f"{what} returned a {type(default).__name__}, not a RunConfig; a recipe returns one.")
    argv, default = with_precision(with_current_names(with_short_names(argv), default), default)
    argv, default = with_sources(argv, default)
    check_settings(argv, default)
    if "--help" in argv or "-h" in argv:
        with_readable_settings(default)
    return tyro.cli(
        tyro.conf.AvoidSubcommands[type(default)], default=default, args=argv, prog=prog, description=recipe.__doc__
    )


def with_current_names(argv: list[str], default: RunConfig) -> list[str]:
    """The arguments with deprecated names of settings replaced by the current ones, and a line on stderr for each."""
    out = []
    for word in argv:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            at, parts = default, []
            for part in name[2:].replace("-", "_").split("."):
                new = new_field_names(at).get(part, part)
                at = at[int(part)] if isinstance(at, tuple) and part.isdigit() else getattr(at, new, None)
                parts.append(new)
            current = "--" + ".".join(parts).replace("_", "-")
            if current != name.replace("_", "-"):
                print_rename(name, current)
                word = current + equals + value
        out.append(word)
    return out


SHORT_NAMES = {"--adapter": "--adapter.kind", ELASTIC: "--elastic.enabled"}
"""Options that stand for a setting of a configuration of the same name."""


def with_short_names(argv: list[str]) -> list[str]:
    """The arguments with ``--adapter NAME`` as ``--adapter.kind NAME``, and ``--elastic`` as ``--elastic.enabled``."""
    words = [word.partition("=") for word in argv]
    return [SHORT_NAMES.get(name, name) + equals + value for name, equals, value in words]


def with_precision(argv: list[str], default: RunConfig) -> tuple[list[str], RunConfig]:
    """Applies ``--precision NAME``; returns the other arguments and the run. Other settings override the preset.

    Raises:
        UsageError: the name is missing.
        ConfigError: there is no precision of that name.
    """
    from jaxllm.train.precision import with_precision

    rest, words = [], iter(argv)
    for word in words:
        if word != "--precision" and not word.startswith("--precision="):
            rest.append(word)
            continue
        name = word.partition("=")[2] or next(words, "")
        if not name:
            raise UsageError("--precision needs a name, such as bf16.")
        default = with_precision(default, name)
    return rest, default


def with_sources(argv: list[str], default: RunConfig) -> tuple[list[str], RunConfig]:
    """Applies ``--sources FILE``, a sources table in place of the recipe's data; returns the other arguments and run.

    Raises:
        UsageError: the file's name is missing.
        DataError, ConfigError: the table cannot be used.
    """
    from jaxllm.data.config import DataConfig
    from jaxllm.data.selection.sources_table import read_sources

    rest, words = [], iter(argv)
    for word in words:
        if word != "--sources" and not word.startswith("--sources="):
            rest.append(word)
            continue
        name = word.partition("=")[2] or next(words, "")
        if not name:
            raise UsageError("--sources needs the file of a sources table, such as mixture.toml.")
        replaced = ("source", "source_format", "content", "separator", "text_field", "heldout")
        own = {field: DataConfig.__dataclass_fields__[field].default for field in replaced}
        data = dataclasses.replace(default.data, mixture=read_sources(Path(name)), **own)
        default = dataclasses.replace(default, data=data)
    return rest, default


def without_together(argv: list[str]) -> tuple[list[str], Path | None]:
    """The arguments without ``--together FILE``, and the file of runs that are trained in one step, or None.

    Raises:
        UsageError: the file's name is missing.
    """
    rest, file, words = [], None, iter(argv)
    for word in words:
        if word != "--together" and not word.startswith("--together="):
            rest.append(word)
            continue
        name = word.partition("=")[2] or next(words, "")
        if not name:
            raise UsageError("--together needs a file with a table of settings for each run, such as runs.toml.")
        file = Path(name)
    return rest, file


def check_settings(argv: list[str], default: RunConfig) -> None:
    """Checks that the configuration has all settings of ``argv``.

    Raises:
        UsageError: a setting is unknown; names the closest ones.
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


def run_recipe(recipe: Recipe, argv: list[str] | None = None, prog: str | None = None) -> int:
    """Trains a recipe with the settings of ``argv`` and returns the exit status; called by recipe files too."""

    def run() -> int:
        words, file = without_together(sys.argv[1:] if argv is None else argv)
        words, rates = without_hardware(words)
        words, budget = without_budget(words)
        words, on = without_topology(words)
        words, switches = without_switches(words)
        if budget is not None and file is not None:
            raise UsageError("--together trains several runs in one step; give each its model.remat, not --within.")
        if switches and file is not None:
            raise UsageError("--together trains several runs in one step, on one mesh; leave --replan out.")
        config = configure(recipe, words, prog)
        use_compilation_cache()
        plans = "auto" in (config.mesh, *(switch.mesh for switch in switches))
        check_hardware_used(rates, budget, plans=plans)
        if on and not plans:
            raise UsageError(f"--on {on}: the devices that --mesh auto plans for; give both, or leave --on out.")

        def laid_out(config: RunConfig) -> RunConfig:
            if config.mesh == "auto":
                config = planned_here(config, on, rates)
            return config if budget is None else fitted_here(config, budget._replace(hardware=rates))

        with processes(config.distributed):
            if file is not None:
                return start_together(laid_out(config), file)
            finished = start_switched(config, switches, laid_out) if switches else start_training(laid_out(config))
        return 0 if finished.complete else 128 + (finished.signal or 0)

    return guarded(run)


def without_topology(argv: list[str]) -> tuple[list[str], str]:
    """The arguments of `jaxllm train` without ``--on TOPOLOGY``, and the topology; empty where there is none."""
    rest, words, on = [], iter(argv), ""
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--on":
            on = value if equals else next(words, "")
            if not on:
                raise UsageError("--on: give the topology that --mesh auto plans for, such as v6e:2x4.")
        else:
            rest.append(word)
    return rest, on


def planned_here(config: RunConfig, on: str, rates: Path | None = None) -> RunConfig:
    """The run with the layout that the search finds for the devices that are here; prints it.

    Args:
        on: topology to plan for; empty: of the devices that are here.
        rates: hardware file of the devices; None: their data sheets.
    """
    import jax

    from jaxllm.plan import hardware
    from jaxllm.plan.automatic_layout import automatic_layout, describe

    layout = automatic_layout(config, on, hardware.TABLE if rates is None else hardware.read(rates))
    if jax.process_index() == 0:
        print(describe(layout), flush=True)
    return layout.run


def without_switches(argv: list[str]) -> tuple[list[str], list[LayoutSwitch]]:
    """The arguments of `jaxllm train` without ``--replan STEP[:MESH]``, and the layout switches that they ask for."""
    rest, found, words = [], [], iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--replan":
            from jaxllm.train.recovery.layout_switch import LayoutSwitch

            try:
                found.append(LayoutSwitch.parse(value if equals else next(words, "")))
            except ValueError as error:
                raise UsageError(f"--replan: {error}") from None
        else:
            rest.append(word)
    return rest, found


def start_training(config: RunConfig) -> TrainResult:
    """Trains a run by the loop for its kind of configuration."""
    return pkgutil.resolve_name(config.loop)(config)


def start_switched(
    config: RunConfig, switches: Sequence[LayoutSwitch], lay_out: Callable[[RunConfig], RunConfig]
) -> TrainResult:
    """Trains a run whose mesh changes; see ``switched_train``.

    Raises:
        UsageError: runs of this kind keep their mesh.
    """
    from jaxllm.train import RunConfig
    from jaxllm.train.recovery.layout_switch import switched_train

    if config.loop != RunConfig.loop:
        raise UsageError(f"--replan: runs of {type(config).__name__} keep their mesh; leave it out.")
    return switched_train(config, switches, lay_out)


def start_together(config: RunConfig, file: Path) -> int:
    """Trains the runs of a file in one step; returns the exit status, 1 if a run stopped by itself.

    Raises:
        UsageError: runs of this kind are not trained together.
    """
    from jaxllm.train import read_runs

    if not config.loop_together:
        raise UsageError(f"--together: runs of {type(config).__name__} are trained one after the other; leave it out.")
    results = pkgutil.resolve_name(config.loop_together)(read_runs(config, file))
    stopped = [result for result in results if not result.complete]
    signals = [result.signal for result in stopped if result.signal is not None]
    return 128 + signals[0] if signals else min(1, len(stopped))


def recipes() -> dict[str, importlib.metadata.EntryPoint]:
    """Installed recipes by name, from entry points; a local directory named ``recipes`` is ignored."""
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=RECIPES)}


def recipe_summary(name: str) -> str:
    """First line of an installed recipe's docstring, read from its source, since importing recipes imports JAX."""
    entry = recipes()[name]
    spec = importlib.util.find_spec(entry.module)
    if spec is None or spec.origin is None:
        return entry.value
    for node in ast.parse(Path(spec.origin).read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == entry.attr:
            return (ast.get_docstring(node) or entry.value).splitlines()[0]
    return entry.value


def find_recipe(name: str) -> Recipe:
    """Finds an installed recipe by name, or loads FUNCTION of FILE for ``FILE.py:FUNCTION``.

    Raises:
        UsageError: there is no such recipe; names the closest.
    """
    file, colon, function = name.rpartition(":")
    if colon and file.endswith(".py"):
        path = Path(file)
        if not path.is_file():
            raise UsageError(f"there is no file {path}; a recipe of your own is FILE.py:FUNCTION.")
        # A distinct module name, so that a file named sharding.py or jax.py does not replace that module.
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


def split_settings(argv: list[str], valued: tuple[str, ...], bare: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Splits arguments into those of the command (first word, named options) and the run's settings.

    Args:
        argv: arguments of the command.
        valued: the command's options that take a value.
        bare: the command's options without a value.
    """
    known, others = [], []
    words = iter(argv)
    for number, word in enumerate(words):
        if word.split("=")[0] in valued:
            known += [word] if "=" in word else [word, *(value for value in [next(words, None)] if value is not None)]
        else:
            (known if word in bare or (number == 0 and not word.startswith("-")) else others).append(word)
    return known, others
