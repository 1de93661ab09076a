"""Leaf paths: pytrees as flat {path: leaf}, and the names of leaves on disk."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxllm.checkpoint.errors import CheckpointError


def leaf_paths(tree: Any) -> dict[str, Any]:
    """Leaves of a pytree by path, such as `opt_state/0/mu/blocks/wq`, in the order of the tree.

    A `/` or `%` inside a key is written `%2F`, `%25`.

    Raises:
        CheckpointError: two leaves have the same path (dict keys `1` and `"1"`).
    """
    leaves: dict[str, Any] = {}
    for entries, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = "/".join(_quote(_entry(e), "/%") for e in entries) or "value"
        if path in leaves:
            raise CheckpointError(f"two leaves of the state have the path {path}: rename a key.")
        leaves[path] = leaf
    return leaves


def storage_keys(path: str) -> tuple[str, ...]:
    """Nested dict keys under which a leaf is stored; its folder's name is these joined by dots."""
    escaped = (re.sub(r"[^A-Za-z0-9_%-]", lambda m: f"%{ord(m.group()):02X}", part) for part in path.split("/"))
    return tuple(part or "%" for part in escaped)


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Nests a flat dict, {"a/b": x} -> {"a": {"b": x}}, with the original characters of the keys."""
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = (_unquote(part) for part in path.split("/"))
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return root


def _entry(entry: Any) -> str:
    """Text of one entry of a pytree path, without JAX's brackets and quotes."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _quote(text: str, characters: Sequence[str]) -> str:
    return "".join(f"%{ord(c):02X}" if c in characters else c for c in text)


def _unquote(text: str) -> str:
    return re.sub(r"%(2F|25)", lambda m: chr(int(m.group(1), 16)), text)
