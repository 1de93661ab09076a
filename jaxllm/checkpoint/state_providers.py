"""State providers: state of other parts of a program that is saved and restored together with the run's state.

    class Average:                                   # running average of the parameters, kept by a callback
        name = "average"
        def arrays(self): return self.params         # any pytree of arrays; None for none
        def facts(self): return {"decay": self.decay}  # JSON; None for nothing
        def restore(self, arrays, facts): ...

    train(config, also=[Average()])

A provider declares its state; snapshot, layout, hashing and storage are done by the checkpoint (the composable state
providers of DataStates-LLM). It may return its arrays as ``StateFragments``, which say of each where it lies, in which
file and in which dtype it is stored (``jaxllm.checkpoint.state_fragments``). The run's own arrays are parameters,
optimizer state, step and random key; its own facts are data cursor, metrics, config and versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from jaxllm.checkpoint.errors import CheckpointError, CheckpointMismatchError
from jaxllm.checkpoint.state_fragments import PackedFragments, StateFragments

PROVIDERS_KEY = "also"
FRAGMENTS_KEY = "fragments"


@runtime_checkable
class StateProvider(Protocol):
    """State provider: a part of a program with state to be checkpointed.

    name: the name under which the state is saved; unique among the providers of a run.
    """

    name: str

    def arrays(self) -> Any:
        """Pytree of the current arrays, or ``StateFragments``, or None; on restore they give shapes and shardings."""
        ...

    def facts(self) -> Any:
        """JSON values that belong to the state, or None."""
        ...

    def restore(self, arrays: Any, facts: Any) -> None:
        """Takes back the arrays and facts that were saved; of ``StateFragments``, the arrays by name."""
        ...


def with_provider_arrays(state: Any, providers: Sequence[StateProvider]) -> Any:
    """Members of the state by name, with the providers' arrays under ``also``; the state itself without any."""
    arrays = {
        one.name: found.files() if isinstance(found, StateFragments) else found
        for one in providers
        if (found := one.arrays()) is not None
    }
    if not arrays:
        return state
    return _members(state) | {PROVIDERS_KEY: arrays}


def with_provider_targets(state: Any, providers: Sequence[StateProvider]) -> Any:
    """``with_provider_arrays`` to restore into: files of fragments are arrays of bytes."""

    def target(leaf: Any) -> Any:
        return leaf.target() if isinstance(leaf, PackedFragments) else leaf

    found = with_provider_arrays(state, providers)
    if not isinstance(found, Mapping) or PROVIDERS_KEY not in found:
        return found
    return {**found, PROVIDERS_KEY: jax.tree.map(target, found[PROVIDERS_KEY])}


def collect_facts(providers: Sequence[StateProvider]) -> dict[str, Any]:
    """Facts of the providers by name, for the checkpoint's ``meta``.

    Raises:
        CheckpointError: two providers have the same name.
    """
    names = [one.name for one in providers]
    if len(set(names)) < len(names):
        raise CheckpointError(f"two state providers have the same name: {', '.join(sorted(names))}.")
    facts: dict[str, Any] = {PROVIDERS_KEY: {one.name: one.facts() for one in providers}} if providers else {}
    return facts | ({FRAGMENTS_KEY: index} if (index := _fragment_index(providers)) else {})


def check_providers(meta: Mapping[str, Any], providers: Sequence[StateProvider]) -> None:
    """Checks that a checkpoint was saved with the same providers.

    Raises:
        CheckpointError: the providers are different; the message names both sets.
        CheckpointMismatchError: a provider's fragments are different.
    """
    saved, here = meta.get(PROVIDERS_KEY, {}), [one.name for one in providers]
    lacking = [name for name in here if name not in saved]
    left = [name for name in saved if name not in here]
    if lacking or left:
        raise CheckpointError(
            f"the checkpoint was saved with the state of {', '.join(saved) or 'no provider'}, but this run has "
            f"{', '.join(here) or 'none'}: pass the same providers to train(also=...), or start a new run."
        )
    files, own = meta.get(FRAGMENTS_KEY, {}), _fragment_index(providers)
    for name in {**files, **own}:
        if files.get(name) != own.get(name):
            raise CheckpointMismatchError(
                f"the state provider {name} was saved with the fragments {files.get(name)}, but has {own.get(name)} "
                "(file: name, shape, dtype, stored dtype): give it the fragments that were saved, or start a new run."
            )


def restore_providers(like: Any, found: Any, meta: Mapping[str, Any], providers: Sequence[StateProvider]) -> Any:
    """State of the structure of ``like`` from the restored values ``found``; the providers restore theirs."""
    said = meta.get(PROVIDERS_KEY, {})
    arrays = found[PROVIDERS_KEY] if isinstance(found, Mapping) else {}
    for one in providers:
        own, like_own = arrays.get(one.name), one.arrays()
        if isinstance(like_own, StateFragments):
            own = like_own.unpacked(own or {})
        one.restore(own, said[one.name])
    if not isinstance(found, Mapping):
        return found
    members = jax.tree.structure(like, is_leaf=lambda x: x is not like)
    return members.unflatten([found[name] for name in _members(like)])


def _fragment_index(providers: Sequence[StateProvider]) -> dict[str, Any]:
    return {one.name: found.index() for one in providers if isinstance(found := one.arrays(), StateFragments)}


def _members(state: Any) -> dict[str, Any]:
    """Members of a pytree by name, in its own order."""
    members = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: x is not state)
    return {jax.tree_util.keystr(path, simple=True): member for path, member in members}
