"""Typed configurations: frozen dataclasses, read from and written to plain JSON, and compared field by field.

Each module defines its own configuration; this file serialises, hashes and compares them.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import types
import typing
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration has an unknown key or an illegal value; the message names it and the legal ones."""


@dataclass(frozen=True, eq=False)
class OneOf:
    """Annotation of a field that is one of several dataclasses, listed in a table that can grow: ``Annotated[Base,
    OneOf(TABLE)]``.

    Attributes:
        rows: the table of classes.
        tag: field whose default names the class, such as ``policy: Literal["majority"] = "majority"``; "": which class
            JSON stands for is seen from its keys.
    """

    rows: Sequence[type]
    tag: str = ""


def runtime_only(default: Any) -> Any:
    """Dataclass field that does not affect the results of a run (how often to log, where to write)."""
    return dataclasses.field(default=default, metadata={"runtime_only": True})


def renamed_fields(**new_names: str) -> Callable[[type[T]], type[T]]:
    """Class decorator that keeps deprecated field names working: ``renamed_fields(old="new")``.

    The constructor, ``dataclasses.replace`` and attribute access accept an old name with a ``FutureWarning``; JSON
    written under old names is read without one. Old names go away in the next release.
    """

    def decorate(cls: type[T]) -> type[T]:
        construct = cls.__init__

        @functools.wraps(construct)
        def __init__(self: T, *args: Any, **fields: Any) -> None:
            for old, new in new_names.items():
                if old in fields:
                    _warn_of_rename(cls, old, new)
                    fields[new] = fields.pop(old)
            construct(self, *args, **fields)

        def attribute(old: str, new: str) -> property:
            def get(self: T) -> Any:
                _warn_of_rename(cls, old, new)
                return getattr(self, new)

            return property(get)

        cls.__init__ = __init__
        for old, new in new_names.items():
            setattr(cls, old, attribute(old, new))
        cls.__renamed_fields__ = dict(new_names)  # pyright: ignore[reportAttributeAccessIssue]
        return cls

    return decorate


def new_field_names(config: Any) -> dict[str, str]:
    """Deprecated field name -> current name, of a configuration or its class."""
    return getattr(config, "__renamed_fields__", {})


def _warn_of_rename(cls: type, old: str, new: str) -> None:
    message = f"{cls.__name__}.{old} is now {new}; the old name goes away in the next release."
    warnings.warn(message, FutureWarning, stacklevel=3)


def to_dict(config: Any) -> dict[str, Any]:
    """Configuration as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(cls: type[T], data: Any, where: str = "config") -> T:
    """Configuration of type ``cls`` from plain JSON values.

    Args:
        where: what is read, for error messages.

    Raises:
        ConfigError: an unknown key (the closest known one is named), or a value of the wrong type.
    """
    return _read(cls, data, where)


def digest(config: Any) -> str:
    """Hash of everything in the configuration that affects the results of a run: 16 hex digits."""
    kept = {path: value for path, value, runtime in _leaves(config) if not runtime}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def flat(config: Any) -> dict[str, Any]:
    """All values by dotted name."""
    return {path: value for path, value, _ in _leaves(config)}


@dataclass(frozen=True)
class Difference:
    """One field in which two configurations differ; ``runtime_only`` says that it does not affect results."""

    path: str
    old: Any
    new: Any
    runtime_only: bool

    def __str__(self) -> str:
        return f"{self.path}: {self.old} -> {self.new}"


def differences(old: Any, new: Any) -> list[Difference]:
    """Fields in which two configurations of one type differ, in order."""
    a = {path: (value, runtime) for path, value, runtime in _leaves(old)}
    b = {path: (value, runtime) for path, value, runtime in _leaves(new)}
    absent = ("absent", False)
    out = []
    for path in [*a, *(p for p in b if p not in a)]:
        (x, runtime), (y, _) = a.get(path, absent), b.get(path, absent)
        if x != y:
            out.append(Difference(path, x, y, runtime or b.get(path, absent)[1]))
    return out


def leaf_paths(config: Any) -> list[str]:
    """Dotted names of all fields that hold a value; members of a tuple by index."""
    return [path for path, _, _ in _leaves(config)]


def closest(name: str, known: typing.Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` with the known name closest to ``name``, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {match[0]!r}?" if match else ""


def _leaves(config: Any, path: str = "", runtime: bool = False) -> typing.Iterator[tuple[str, Any, bool]]:
    if dataclasses.is_dataclass(config):
        for field in dataclasses.fields(config):
            inner = runtime or bool(field.metadata.get("runtime_only"))
            yield from _leaves(getattr(config, field.name), f"{path}.{field.name}".lstrip("."), inner)
    elif isinstance(config, tuple) and any(dataclasses.is_dataclass(item) for item in config):
        for i, item in enumerate(config):
            yield from _leaves(item, f"{path}.{i}", runtime)
    else:
        yield path, list(config) if isinstance(config, tuple) else config, runtime


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _read(kind: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: expected the fields of {kind.__name__}, got {value!r}.")
        renamed = new_field_names(kind)
        value = {renamed.get(key, key): item for key, item in value.items()}
        hints = _hints(kind)
        names = [f.name for f in dataclasses.fields(kind)]
        for key in value:
            if key not in names:
                raise ConfigError(
                    f"{where}: unknown key {key!r}.{closest(key, names)} {kind.__name__} has: {', '.join(names)}."
                )
        return kind(**{key: _read(hints[key], item, f"{where}.{key}") for key, item in value.items()})
    if origin is typing.Annotated:
        tables = [extra for extra in args[1:] if isinstance(extra, OneOf)]
        if not tables:
            return _read(args[0], value, where)
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: expected the fields of a class, got {value!r}.")
        table = tables[0]
        member = _tagged(table, value, where) if table.tag else _member(list(table.rows), value, where)
        return _read(member, value, where)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        kinds = [arg for arg in args if dataclasses.is_dataclass(arg)]
        if len(kinds) > 1 and isinstance(value, dict):
            return _read(_member(kinds, value, where), value, where)
        errors = []
        for arg in args:
            if arg is not type(None):
                try:
                    return _read(arg, value, where)
                except ConfigError as error:
                    errors.append(str(error))
        raise ConfigError(errors[0])
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{where}: {value!r} is not one of {', '.join(map(repr, args))}.")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where}: expected a list, got {value!r}.")
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_read(args[0], item, f"{where}.{i}") for i, item in enumerate(value))
        if len(value) != len(args):
            raise ConfigError(f"{where}: expected {len(args)} values, got {len(value)}.")
        return tuple(_read(arg, item, f"{where}.{i}") for i, (arg, item) in enumerate(zip(args, value, strict=True)))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise ConfigError(f"{where}: expected {kind.__name__}, got {value!r}.")
    return value


def _tagged(table: OneOf, value: dict[str, Any], where: str) -> Any:
    """The class of a table that the tag of ``value`` names.

    Raises:
        ConfigError: there is no tag, or no such class.
    """
    fields = [(kind, field) for kind in table.rows for field in dataclasses.fields(kind)]
    named = {str(field.default): kind for kind, field in fields if field.name == table.tag}
    if (name := value.get(table.tag)) not in named:
        raise ConfigError(
            f"{where}: {table.tag} = {name!r}.{closest(str(name), named)} Legal values: {', '.join(named)}."
        )
    return named[name]


def _member(kinds: list[Any], value: dict[str, Any], where: str) -> Any:
    """The class of a union that has all fields of ``value``, and the fewest others, which older JSON lacks.

    Raises:
        ConfigError: no class has all of them, or two have equally few others.
    """
    fields = {kind: {field.name for field in dataclasses.fields(kind)} for kind in kinds}
    others: dict[int, list[Any]] = {}
    for kind in kinds:
        renamed = new_field_names(kind)
        given = {renamed.get(key, key) for key in value}
        if given <= fields[kind]:
            others.setdefault(len(fields[kind] - given), []).append(kind)
    if others and len(nearest := others[min(others)]) == 1:
        return nearest[0]
    legal = "; ".join(f"{kind.__name__}: {', '.join(sorted(names))}" for kind, names in fields.items())
    raise ConfigError(f"{where}: the fields {', '.join(sorted(value))} match none of these classes: {legal}.")
