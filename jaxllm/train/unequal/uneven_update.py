"""Uneven update: optimizer update of one unit whose state is in parts of unequal size.

    slices      all devices: parameters, gradients -> each device's slice of them; gradients are clipped
    update      each device by itself: its slices, its part of the state -> new slices, new part in the same memory
    whole       all devices: all-gather of the new slices -> new parameters; squared norm of the update

State never moves. Parameters are whole over the uneven axes before and after, and only their new slices are
communicated. The update is that of one device to the bit, because it computes each element by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxllm.optim.streamed_state import layer_row
from jaxllm.train.disk.disk_step import Make, clipped_by, part_of, unit_counters, unit_update
from jaxllm.train.unequal.uneven_slices import NO_MESH, UnevenCut, from_slices, joined, to_slices, uneven_index
from jaxllm.train.unequal.uneven_state import Rows, UnevenState


class UnevenUpdate:
    """Update of the units of one segment, or of what is outside of layers, to be lowered.

    Args:
        rule: optimizer of a unit's parameters, which computes each element by itself.
        clip_norm: global norm that gradients are clipped to; None: any.
        opt_state: the whole optimizer state, abstract.
        state: the parts.
        segment: of the units; empty: everything outside of layers.
    """

    def __init__(
        self,
        rule: optax.GradientTransformation,
        clip_norm: float | None,
        opt_state: Any,
        state: UnevenState,
        segment: str,
    ):
        self.rule, self.clip_norm, self.opt_state, self.state, self.segment = rule, clip_norm, opt_state, state, segment

    def outputs(self, params: Any, *rest: Any) -> tuple[Any, None, None, jax.ShapeDtypeStruct]:
        """Shapes of a unit's new parameters and of the squared norm of the update; arguments as of ``lower``."""
        new = _abstract_unit(params, self.segment)
        dtype = jnp.result_type(*(x.dtype for x in jax.tree.leaves(new)))
        everywhere = NamedSharding(self.state.mesh, PartitionSpec())
        return new, None, None, jax.ShapeDtypeStruct((), dtype, sharding=everywhere)

    def lower(self, params: Any, grads: Any, norm: Any, counters: Any, arrays: Any, row: Any) -> LoweredUnevenUpdate:
        """Lowers the programs for abstract arguments, those of an update in one program; the run's mesh is set."""
        state, segment, mesh = self.state, self.segment, self.state.mesh
        shapes, structure = jax.tree.flatten(_abstract_unit(params, self.segment))
        cuts = [state.cut(x, bool(segment)) for x in shapes]

        def slices(params: Any, grads: Any, norm: Any, row: Any) -> tuple[list[jax.Array], list[jax.Array]]:
            own = layer_row((params, grads), row) if segment else (params, grads)
            clipped = own[1]
            if self.clip_norm is not None:
                clipped = jax.tree.map(lambda g, most=self.clip_norm: clipped_by(norm, most, g), clipped)
            return to_slices(cuts, jax.tree.leaves(own[0])), to_slices(cuts, jax.tree.leaves(clipped))

        begun = jax.jit(slices).lower(params, grads, norm, row)
        given = jax.eval_shape(slices, params, grads, norm, row)
        updates, written = {}, None
        of_unit = unit_update(self.rule, self.opt_state, segment)
        for device in state.devices:
            there = SingleDeviceSharding(device)

            def on(x: Any, cut: UnevenCut | None = None, there: Any = there) -> jax.ShapeDtypeStruct:
                shape = x.shape if cut is None else NamedSharding(mesh, cut.sliced).shard_shape(x.shape)
                return jax.ShapeDtypeStruct(shape, x.dtype, sharding=there)

            sliced = [[on(x, cut) for cut, x in zip(cuts, many, strict=True)] for many in given]
            own = sliced[0], sliced[1], [on(x) for x in counters], state.abstract_parts(segment, device)
            update = _on_one_device(of_unit, cuts, structure, uneven_index(mesh, state.over, device))
            with jax.set_mesh(NO_MESH):
                jitted = jax.jit(update, donate_argnums=3)
                written = jax.eval_shape(update, *own) if written is None else written
                updates[device] = jitted.lower(*own)
        assert written is not None  # a process has devices
        every = PartitionSpec(mesh.axis_names)
        squares = jax.ShapeDtypeStruct((mesh.size, len(cuts)), written[3].dtype, sharding=NamedSharding(mesh, every))
        back = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, cut.sliced))
            for cut, x in zip(cuts, _slices_of_all(cuts, state, written[0]), strict=True)
        ]

        def whole(slices: list[jax.Array], squares: jax.Array) -> tuple[Any, jax.Array]:
            return structure.unflatten(from_slices(cuts, slices)), _sum_of(squares, cuts, every)

        ended = jax.jit(whole).lower(back, squares)
        return LoweredUnevenUpdate(begun, updates, ended, cuts, state)


class LoweredUnevenUpdate:
    """Programs of an ``UnevenUpdate``, lowered or compiled; compiled, it is called as an update in one program is.

    Args:
        slices, updates, whole: the programs; of updates by device of this process.
        cuts: of the unit's parameters.
        state: the parts.
    """

    def __init__(
        self, slices: Any, updates: dict[jax.Device, Any], whole: Any, cuts: Sequence[UnevenCut], state: UnevenState
    ):
        self.slices, self.updates, self.whole, self._cuts, self._state = slices, updates, whole, cuts, state

    def compile(self, compiler_options: dict[str, Any] | None = None) -> LoweredUnevenUpdate:
        """The programs compiled, with options of the compiler."""
        slices, whole = (x.compile(compiler_options=compiler_options) for x in (self.slices, self.whole))
        updates = {device: x.compile(compiler_options=compiler_options) for device, x in self.updates.items()}
        return LoweredUnevenUpdate(slices, updates, whole, self._cuts, self._state)

    def working_bytes(self) -> int:
        """Bytes of a device that the compiled programs take beside parameters, gradients and state."""
        slices, whole = (one.memory_analysis() for one in (self.slices, self.whole))
        own = [one.memory_analysis() for one in self.updates.values()]
        update = max(one.output_size_in_bytes - one.alias_size_in_bytes + one.temp_size_in_bytes for one in own)
        given: int = slices.output_size_in_bytes + slices.temp_size_in_bytes
        return given + update + whole.output_size_in_bytes + whole.temp_size_in_bytes

    def as_text(self) -> str:
        """Text of all programs."""
        return "".join(one.as_text() for one in (self.slices, *self.updates.values(), self.whole))

    def __call__(
        self, params: Any, grads: Any, norm: Any, counters: Sequence[jax.Array], arrays: Rows, row: Any
    ) -> tuple[Any, Rows, list[jax.Array], jax.Array]:
        """New parameters of the unit, parts, counters, and squared norm of the update; the parts are donated."""
        mesh = self._state.mesh
        sliced = [[_by_device(x) for x in many] for many in self.slices(params, grads, norm, row)]
        counts = [_by_device(x) for x in counters]
        done = {
            device: update(*([x[device] for x in many] for many in (*sliced, counts)), arrays[device])
            for device, update in self.updates.items()
        }
        back = [
            joined(mesh, cut, {device: one[0][place] for device, one in done.items()})
            for place, cut in enumerate(self._cuts)
        ]
        new: list[jax.Array] = [
            jax.make_array_from_single_device_arrays((), x.sharding, [one[2][place] for one in done.values()])
            for place, x in enumerate(counters)
        ]
        every = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        squares = jax.make_array_from_single_device_arrays(
            (mesh.size, len(self._cuts)), every, [one[3] for one in done.values()]
        )
        part, square = self.whole(back, squares)
        return part, {device: list(one[1]) for device, one in done.items()}, new, square


def initial_parts(make: Make, logical_axes: dict[str, Any], params: Any, state: UnevenState) -> Any:
    """Parts of the optimizer state before the first step, unit by unit; returns the state with ``UnevenLeaf``.

    Args:
        make: logical axes of a part of the parameters -> its optimizer, without gradient clipping.
        logical_axes: of all parameters.
        params: the parameters, on the mesh, which is set.
        state: the parts.
    """
    inits = {
        segment: _InitialPartsOfUnit(make(part_of(logical_axes, segment)), part_of(params, segment), state, segment)
        for segment in dict.fromkeys(unit.segment for unit in state.units)
    }
    for number, (segment, row) in enumerate(state.units):
        state.give(number, inits[segment](part_of(params, segment), row))
    return state.with_kept(unit_counters(make, logical_axes, params, state))


class _InitialPartsOfUnit:
    """Parts of a unit's state before the first step, from the parameters of all units of its segment."""

    def __init__(self, rule: optax.GradientTransformation, params: Any, state: UnevenState, segment: str):
        leaves, structure = jax.tree.flatten(_abstract_unit(params, segment))
        cuts = [state.cut(x, bool(segment)) for x in leaves]

        def slices(params: Any, row: Any) -> list[jax.Array]:
            return to_slices(cuts, jax.tree.leaves(layer_row(params, row) if segment else params))

        def init(pieces: list[jax.Array], index: int) -> list[jax.Array]:
            own = structure.unflatten([cut.own_part(x, index) for cut, x in zip(cuts, pieces, strict=True)])
            return [leaf for leaf in jax.tree.leaves(rule.init(own)) if leaf.ndim]

        self._slices, self._init, self._state = jax.jit(slices), jax.jit(init, static_argnums=1), state

    def __call__(self, params: Any, row: int) -> Rows:
        state, sliced = self._state, [_by_device(x) for x in self._slices(params, row)]
        with jax.set_mesh(NO_MESH):
            return {
                device: self._init([x[device] for x in sliced], uneven_index(state.mesh, state.over, device))
                for device in state.devices
            }


def _abstract_unit(params: Any, segment: str) -> Any:
    """Abstract parameters of one unit of a segment, from those of all."""
    shape = (lambda x: (1, *x.shape[1:])) if segment else lambda x: x.shape
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape(x), x.dtype, sharding=x.sharding), params)


def _on_one_device(
    of_unit: Callable[..., Any], cuts: Sequence[UnevenCut], structure: Any, index: int
) -> Callable[..., Any]:
    """Update of a device's part: ``(slices of parameters, of gradients, counters, arrays) -> (slices, arrays, counters,
    squared norms [1, leaves])``."""

    def update(params: Any, grads: Any, counters: Any, arrays: Any) -> Any:
        own, given = (
            structure.unflatten([cut.own_part(x, index) for cut, x in zip(cuts, many, strict=True)])
            for many in (params, grads)
        )
        changed, new, counts, changes = of_unit(own, given, counters, arrays)
        squares = jnp.stack([optax.tree.norm([one], squared=True) for one in jax.tree.leaves(changes)])
        parts = [cut.padded(x, index) for cut, x in zip(cuts, jax.tree.leaves(changed), strict=True)]
        return parts, new, counts, squares[None]

    return update


def _sum_of(squares: jax.Array, cuts: Sequence[UnevenCut], every: PartitionSpec) -> jax.Array:
    """Squared norm of an update from those of all devices' parts, each counted once. [devices, leaves] -> scalar"""

    def here(own: jax.Array) -> jax.Array:
        total = jnp.zeros((), own.dtype)
        for number, cut in enumerate(cuts):
            axes = tuple(
                a for part in cut.whole if part is not None for a in ((part,) if isinstance(part, str) else part)
            )
            axes += cut.over if cut.dim is not None else ()
            total += jax.lax.psum(own[0, number], axes) if axes else own[0, number]
        return total

    return jax.shard_map(
        here, mesh=jax.sharding.get_abstract_mesh(), in_specs=every, out_specs=PartitionSpec(), check_vma=False
    )(squares)


def _slices_of_all(cuts: Sequence[UnevenCut], state: UnevenState, own: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Global shapes of slices, from those of a device."""
    found = []
    for cut, x in zip(cuts, own, strict=True):
        shard = NamedSharding(state.mesh, cut.sliced).shard_shape((len(cut.bounds) - 1, *cut.shape))
        scale = [n // m for n, m in zip((len(cut.bounds) - 1, *cut.shape), shard, strict=True)]
        found.append(jax.ShapeDtypeStruct(tuple(n * s for n, s in zip(x.shape, scale, strict=True)), x.dtype))
    return found


def _by_device(x: jax.Array) -> dict[jax.Device, jax.Array]:
    return {shard.device: shard.data for shard in x.addressable_shards}
