"""State of other parts of a program, saved and restored together with a run's own.

    class Average:                                   # of the parameters, kept by a callback
        name = "average"
        def arrays(self): return self.params         # any pytree of arrays; None for none
        def facts(self): return {"decay": self.decay}  # JSON; None for nothing
        def restore(self, arrays, facts): ...

    train(config, also=[Average()])

A provider says what its state is, not how it moves: snapshot, layout, hashing and storage are the checkpoint's
(the composable state providers of DataStates-LLM). A run's parameters, optimizer, step and random key are
the arrays of its own state; its data cursor, metrics, config and versions are its own facts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxllm.checkpoint.errors import CheckpointError

KEY = "also"


@runtime_checkable
class StateProvider(Protocol):
    """A part of a program that has a state.

    name: under which it is saved; another one for each provider of a run.
    arrays: its arrays as they are now; on restoring they say shapes, dtypes and shardings.
    facts: what else it needs, as JSON.
    restore: takes back what both gave.
    """

    name: str

    def arrays(self) -> Any: ...

    def facts(self) -> Any: ...

    def restore(self, arrays: Any, facts: Any) -> None: ...


def with_arrays(state: Any, providers: Sequence[StateProvider]) -> Any:
    """A dataclass's fields, and below ``also`` the providers' arrays; the state itself where there are none."""
    arrays = {one.name: found for one in providers if (found := one.arrays()) is not None}
    if not arrays:
        return state
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)} | {KEY: arrays}


def facts(providers: Sequence[StateProvider]) -> dict[str, Any]:
    """The providers' facts by name, for the checkpoint's ``meta``.

    Raises:
        CheckpointError: two have the same name.
    """
    names = [one.name for one in providers]
    if len(set(names)) < len(names):
        raise CheckpointError(f"two state providers have the same name: {', '.join(sorted(names))}.")
    return {KEY: {one.name: one.facts() for one in providers}} if providers else {}


def give_back(kind: type, found: Any, meta: Mapping[str, Any], providers: Sequence[StateProvider]) -> Any:
    """The state of ``kind`` from what was restored; the providers take theirs.

    Raises:
        CheckpointError: the checkpoint has no state of one of them.
    """
    said = meta.get(KEY, {})
    if missing := [one.name for one in providers if one.name not in said]:
        raise CheckpointError(
            f"the checkpoint was saved without the state of {', '.join(missing)} (it has {', '.join(said) or 'none'}): "
            "leave these providers out, or start a new run."
        )
    arrays = found[KEY] if isinstance(found, Mapping) else {}
    for one in providers:
        one.restore(arrays.get(one.name), said[one.name])
    if not isinstance(found, Mapping):
        return found
    return kind(**{field.name: found[field.name] for field in dataclasses.fields(kind)})
