"""Optimizer offload: the optimizer state of layers stays in host memory and is streamed layer by layer for the update.

Arrays of it that are in device memory, the persistent ones (``jaxllm.train.host_offload``), are updated there.
Double buffering: while one layer is updated, the next one's state is copied in and the one before's out. One of every
``device_every`` layers is updated on the device, the others at the same time by the host's CPU where their state is:
their gradients and parameters are copied there and their updates back (Deep Optimizer States, arXiv:2410.21316,
section 4.1).

Legend: L repeats of a segment's group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental import compute_on
from jaxtyping import Array, Int

Make = Callable[[Any], optax.GradientTransformation]


def streamed_optimizer(
    make: Make, clip: optax.GradientTransformation, logical_axes: dict[str, Any], device_every: int
) -> optax.GradientTransformation:
    """Same result and state as ``optax.chain(clip, ...)``, computed layer by layer with the state in host memory.

    Args:
        make: logical axes of some parameters -> the chain without ``clip``; its state of a layer must depend on that
            layer alone.
        clip: gradient clipping by global norm; keeps no state.
        logical_axes: of all parameters.
        device_every: one of so many layers is updated on the device.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        grads, _ = clip.update(updates, clip.init(params), params)
        ends = [name for name in logical_axes if name != "segments"]
        parts = [part_of_model(tree, ends) for tree in (grads, state, params)]
        end_updates, new = make(part_of_model(logical_axes, ends)).update(*parts)
        out: dict[str, Any] = {**end_updates, "segments": {}}  # type: ignore[dict-item]
        for s in logical_axes["segments"]:
            parts = [part_of_model(tree, ["segments"], s) for tree in (grads, state, params)]
            own, more = _by_layer(make(part_of_model(logical_axes, ["segments"], s)), *parts, device_every=device_every)
            out["segments"] |= own["segments"]
            new = merged_parts(new, more)
        return out, new

    return optax.GradientTransformation(make(logical_axes).init, update)


def _by_layer(
    rule: optax.GradientTransformation, grads: Any, state: Any, params: Any, device_every: int
) -> tuple[Any, Any]:
    """Updates and new state of a segment; the updates overwrite the gradients' buffers."""
    leaves, structure = jax.tree.flatten(state)
    repeats = len(jax.tree.leaves(grads)[0])

    def state_of(rows: list[Array]) -> Any:
        """State of one layer with the step counters, which all layers share."""
        rest = iter(rows)
        return structure.unflatten([next(rest) if leaf.ndim else leaf for leaf in leaves])

    def rows_of(state: Any) -> list[Array]:
        return [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]

    stays = [jax.typeof(leaf).memory_space == jax.memory.Space.Device for leaf in leaves if leaf.ndim]

    def parted(rows: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        """Arrays that stay on the device, and those that are streamed."""
        pairs = list(zip(rows, stays, strict=True))
        return [row for row, stay in pairs if stay], [row for row, stay in pairs if not stay]

    def joined(fixed: Sequence[Array], streamed: Sequence[Array]) -> list[Array]:
        """The reverse of ``parted``."""
        these, those = iter(fixed), iter(streamed)
        return [next(these) if stay else next(those) for stay in stays]

    def on_device(number: Array, updates: Any, here: list[Array]) -> tuple[Any, Any]:
        return rule.update(layer_row(updates, number), state_of(here), layer_row(params, number))

    def on_host(number: Array, updates: Any, stacks: list[Array]) -> tuple[Any, Any]:
        given = _to_memory((layer_row(updates, number), layer_row(params, number)), jax.memory.Space.Host)

        def update(updates: Any, stacks: list[Array], params: Any, number: Array) -> tuple[Any, Any]:
            # The host takes the layer's rows out of the stacks: taken before, they would go to the device and back.
            return rule.update(updates, state_of(layer_row(stacks, number)), params)

        changes, new = _on_host(jax.jit(update))(given[0], stacks, given[1], _to_memory(number, jax.memory.Space.Host))
        return _to_memory(changes, jax.memory.Space.Device), new

    def layers(updates: Any, arrays: list[Array], first: int, groups: int, every: int) -> tuple[Any, list[Array]]:
        """Updates ``groups`` times ``every`` layers; of each group the first on the device, the others on the host."""

        def one(carry: tuple[Any, ...], number: Int[Array, ""]) -> tuple[Any, None]:
            updates, fixed, stacks, here, left = carry
            coming = _to_memory(layer_row(stacks, jnp.minimum(number + every, repeats - 1)), jax.memory.Space.Device)
            stacks = put_layer_row(stacks, left, jnp.maximum(number - every, first))
            own = on_device(number, updates, joined(layer_row(fixed, number), here))
            done = [(i, *on_host(number + i, updates, stacks)) for i in range(1, every)]
            if every > 1:  # otherwise XLA copies the stacks, since the host may still read what is written in place
                done, stacks, coming, own = jax.lax.optimization_barrier((done, stacks, coming, own))
            for i, changes, new in done:
                updates, stacks = (
                    put_layer_row(updates, changes, number + i),
                    put_layer_row(stacks, rows_of(new), number + i),
                )
            new_fixed, leaving = parted(rows_of(own[1]))
            fixed = put_layer_row(fixed, new_fixed, number)
            # The device's rows are copied back during the next turn; here nothing would be left to compute beside it.
            return (put_layer_row(updates, own[0], number), fixed, stacks, coming, leaving), None

        numbers = first + every * jnp.arange(groups, dtype=jnp.int32)
        fixed, stacks = parted(arrays)
        here = _to_memory(layer_row(stacks, jnp.int32(first)), jax.memory.Space.Device)
        # The first turn writes back what it has read: the rows of a turn before the first.
        updates, fixed, stacks, _, left = jax.lax.scan(one, (updates, fixed, stacks, here, here), numbers)[0]
        return updates, joined(fixed, put_layer_row(stacks, left, numbers[-1]))

    whole = repeats // device_every
    updates, stacks = layers(grads, rows_of(state), 0, whole, device_every)
    if left := repeats - whole * device_every:
        updates, stacks = layers(updates, stacks, repeats - left, left, 1)
    counted = iter(
        jax.tree.leaves(
            on_device(jnp.int32(0), grads, _to_memory(layer_row(rows_of(state), 0), jax.memory.Space.Device))[1]
        )
    )
    kept = iter(stacks)
    return updates, structure.unflatten([next(kept) if new.ndim else new for new in counted])


def layer_row(tree: Any, number: Any) -> Any:
    """One layer of stacked arrays, [1, ...]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, number, 1), tree)


def put_layer_row(tree: Any, rows: Any, number: Array) -> Any:
    """Stacked arrays with one layer replaced, in their memory."""

    def into(stack: Array, row: Array) -> Array:
        there = jax.device_put(row, jax.typeof(stack).memory_space)
        return jax.lax.dynamic_update_slice_in_dim(stack, there, number, 0)

    return jax.tree.map(into, tree, rows)


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled for the host's CPU: its arguments and results are in host memory."""
    if jax.__version_info__ >= (0, 12):
        newest: Any = compute_on.compute_on
        return newest(function, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)

    def run(*args: Any) -> Any:
        with compute_on.compute_on("device_host"):
            return function(*args)

    return run


def _to_memory(tree: Any, to: jax.memory.Space) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, to), tree)


def part_of_model(tree: Any, names: list[str], segment: str | None = None) -> Any:
    """Part of a tree of arrays, or of states that contain such trees: some ends of the model, or one segment."""
    if isinstance(tree, dict) and {"embedding", "segments", "head"} <= set(tree):
        picked = {name: tree[name] for name in names}
        return picked if segment is None else {"segments": {segment: tree["segments"][segment]}}
    return _mapped(lambda one: part_of_model(one, names, segment), tree)


def merged_parts(a: Any, b: Any) -> Any:
    """Joins two parts of a state."""
    if isinstance(a, dict) and {"segments", "embedding"} & set(a) and {"segments", "embedding"} & set(b):
        return a | b | {"segments": a.get("segments", {}) | b.get("segments", {})}
    if isinstance(a, (dict, list, tuple)):
        if isinstance(a, dict):
            return {name: merged_parts(a[name], b[name]) for name in a}
        parts = [merged_parts(x, y) for x, y in zip(a, b, strict=True)]
        return type(a)(*parts) if hasattr(a, "_fields") else type(a)(parts)
    return a


def _mapped(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Maps ``fn`` over the members of a container; other values are returned as they are."""
    if isinstance(tree, dict):
        return {name: fn(one) for name, one in tree.items()}
    if isinstance(tree, (list, tuple)):
        parts = [fn(one) for one in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree
