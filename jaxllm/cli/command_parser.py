"""Command parser: a command's options from the signature and the docstring of a function, with readable help.

tyro makes the parser. What it is given here are names for the words of the command line (``MODEL`` where the type alone
would say ``STR``) and each option's description as one paragraph, which it wraps at the terminal's width.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
import tempfile
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxllm.cli.errors import UsageError


def parse_command(function: Callable[..., Any], argv: Sequence[str], prog: str) -> Any:
    """Calls a function with the arguments of a command line and returns what it returns."""
    return tyro.cli(with_readable_help(function), args=argv, prog=prog)


def parse_subcommands(functions: dict[str, Callable[..., Any]], argv: Sequence[str], prog: str, about: str) -> Any:
    """Calls the function that the first argument names with the others, and returns what it returns."""
    named = {name: with_readable_help(function) for name, function in functions.items()}
    return tyro.extras.subcommand_cli_from_dict(named, args=argv, prog=prog, description=about)


def check_outputs(**files: Path | None) -> None:
    """Makes the directories of files that a command writes at its end, before it begins its work.

    Args:
        **files: path of each by the name of its option; None: it is not given.

    Raises:
        UsageError: one cannot be written.
    """
    for name, file in files.items():
        if file is not None:
            option = f"--{name.replace('_', '-')} {file}"
            if file.is_dir():
                raise UsageError(f"{option} is a directory; give the path of a file.")
            make_writable(file.parent, option)


def make_writable(directory: Path, option: str) -> None:
    """Makes a directory, unless it is there.

    Args:
        directory: to write files in.
        option: that named it, for the error.

    Raises:
        UsageError: no file can be made there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise UsageError(f"{option}: no file can be made in {directory} ({error}); give another path.") from error


def with_readable_help(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose annotations and docstring are changed to those that its help is made of."""
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        metavar = _positional(name, hint) if parameter.kind is parameter.POSITIONAL_ONLY else _optional(hint)
        if metavar is not None:
            hints[name] = Annotated[hint, tyro.conf.arg(metavar=metavar)]
    documented = wrapped_docstring(function.__doc__ or "")
    for one in (function, inspect.unwrap(function)):  # tyro reads what is below decorators
        one.__annotations__, one.__doc__ = hints, documented
    return function


def with_readable_settings(config: Any) -> None:
    """Changes the docstrings of a configuration's dataclasses, and of those inside, to what help is made of."""
    if isinstance(config, tuple):
        for one in config:
            with_readable_settings(one)
    elif dataclasses.is_dataclass(config):
        type(config).__doc__ = wrapped_docstring(type(config).__doc__ or "")
        for field in dataclasses.fields(config):
            with_readable_settings(getattr(config, field.name))


def wrapped_docstring(docstring: str) -> str:
    """Docstring for tyro: entries of ``Args:`` are one line each, other text has the width of the terminal.

    tyro wraps the former itself. It does not wrap the latter, and keeps no line break before a letter, so that lines
    after the first of a paragraph are indented.
    """
    width = shutil.get_terminal_size().columns
    return "\n\n".join(
        re.sub(r"\n {8,}", " ", one)
        if re.match(r"\w+:\n", one)
        else textwrap.fill(" ".join(one.split("\n")), width, subsequent_indent=" ")
        for one in inspect.cleandoc(docstring).split("\n\n")
    )


def _positional(name: str, hint: Any) -> str:
    """Metavar of a positional word: the parameter's name in capitals."""
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    word = name.upper()
    if typing.get_origin(inner) is tuple:
        word = word.removesuffix("S")
        return f"{word} [{word} ...]"
    return word


def _optional(hint: Any) -> str | None:
    """Metavar of an option whose value may be None: that of its other type; None for other options."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType) or type(None) not in typing.get_args(hint):
        return None
    others = [one for one in typing.get_args(hint) if one is not type(None)]
    if len(others) != 1:
        return None
    if typing.get_origin(others[0]) is typing.Literal:
        return "{" + ",".join(map(str, typing.get_args(others[0]))) + "}"
    return getattr(others[0], "__name__", "").upper() or None
