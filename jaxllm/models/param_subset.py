"""Trainable parameters: a subset of a model's, chosen by role and by name; the others stay frozen.

A subset is a tree of booleans. Its trees of arrays have None, an empty pytree, in place of the other parameters, so
that gradients and optimizer states of the others do not exist.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import jax

from jaxllm.config import ConfigError, closest
from jaxllm.models.functional import Functional, Params


def trainable_mask(model: Functional, patterns: Sequence[str]) -> Params | None:
    """Tree of booleans, True for the parameters that a pattern matches; None for all of them (no pattern).

    A pattern is a role ("gain"), a name on the parameter's path ("attention", "*norm*", "q") or a whole path
    ("segments/0/*/mlp/*").

    Raises:
        ConfigError: a pattern matches no parameter; lists what is legal.
    """
    if not patterns:
        return None
    roles = model.roles()
    found = [
        (role, jax.tree_util.keystr(path, simple=True, separator="/"))
        for path, role in jax.tree_util.tree_leaves_with_path(roles)
    ]
    for pattern in patterns:
        if not any(_matches(pattern, *one) for one in found):
            raise ConfigError(_no_match(pattern, found))
    mask = [any(_matches(pattern, *one) for pattern in patterns) for one in found]
    return None if all(mask) else jax.tree.structure(roles).unflatten(mask)


def select(mask: Params | None, tree: Any) -> Any:
    """``tree`` with None in place of the parameters outside the subset; ``tree`` itself where ``mask`` is None."""
    return tree if mask is None else jax.tree.map(lambda chosen, leaf: leaf if chosen else None, mask, tree)


def merge(selected: Any, tree: Any) -> Any:
    """``tree`` with the parameters of ``selected`` in place of its own."""
    return jax.tree.map(lambda own, leaf: leaf if own is None else own, selected, tree, is_leaf=is_frozen)


def is_frozen(leaf: Any) -> bool:
    """Whether a leaf of a subset's tree stands for a parameter outside the subset."""
    return leaf is None


def _matches(pattern: str, role: str, path: str) -> bool:
    names = [path, *(name for name in path.split("/") if not name.isdecimal())]
    return pattern == role or any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _no_match(pattern: str, found: list[tuple[str, str]]) -> str:
    roles = sorted({role for role, _ in found})
    names = sorted({name for _, path in found for name in path.split("/") if not name.isdecimal()})
    return (
        f"trainable: {pattern!r} matches no parameter.{closest(pattern, [*roles, *names])} Legal: a role "
        f"({', '.join(roles)}), a name ({', '.join(names)}) or a pattern of one (*norm*), or a pattern of whole paths "
        f"({found[0][1]}, segments/0/*)."
    )
