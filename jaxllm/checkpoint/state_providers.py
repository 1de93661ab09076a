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

PROVIDERS_KEY = "also"


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


def with_provider_arrays(state: Any, providers: Sequence[StateProvider]) -> Any:
    """A dataclass's fields, and below ``also`` the providers' arrays; the state itself where there are none."""
    arrays = {one.name: found for one in providers if (found := one.arrays()) is not None}
    if not arrays:
        return state
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)} | {PROVIDERS_KEY: arrays}


def collect_facts(providers: Sequence[StateProvider]) -> dict[str, Any]:
    """The providers' facts by name, for the checkpoint's ``meta``.

    Raises:
        CheckpointError: two have the same name.
    """
    names = [one.name for one in providers]
    if len(set(names)) < len(names):
        raise CheckpointError(f"two state providers have the same name: {', '.join(sorted(names))}.")
    return {PROVIDERS_KEY: {one.name: one.facts() for one in providers}} if providers else {}


def check_providers(meta: Mapping[str, Any], providers: Sequence[StateProvider]) -> None:
    """Refuses a checkpoint that was saved with other providers.

    Raises:
        CheckpointError: names those that one side lacks.
    """
    saved, here = meta.get(PROVIDERS_KEY, {}), [one.name for one in providers]
    lacking = [name for name in here if name not in saved]
    left = [name for name in saved if name not in here]
    if lacking or left:
        raise CheckpointError(
            f"the checkpoint was saved with the state of {', '.join(saved) or 'no provider'}, and this run has "
            f"{', '.join(here) or 'none'}: give train(also=...) the same, or start a new run."
        )


def restore_providers(kind: type, found: Any, meta: Mapping[str, Any], providers: Sequence[StateProvider]) -> Any:
    """The state of ``kind`` from what was restored; the providers take theirs."""
    said = meta.get(PROVIDERS_KEY, {})
    arrays = found[PROVIDERS_KEY] if isinstance(found, Mapping) else {}
    for one in providers:
        one.restore(arrays.get(one.name), said[one.name])
    if not isinstance(found, Mapping):
        return found
    return kind(**{field.name: found[field.name] for field in dataclasses.fields(kind)})
