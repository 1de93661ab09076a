"""Start of a run with its parameters in files: what is drawn or loaded goes to the files array by array."""

from __future__ import annotations

from typing import Any

import jax

from jaxllm.models import Functional
from jaxllm.train.disk.disk_step import Make, part_of
from jaxllm.train.disk.state_files import StateFiles, put_on_disk


def stored_params(model: Functional, seed: int, abstract: Any, files: StateFiles, params: Any = None) -> Any:
    """Writes initial parameters to files; returns them with ``DiskLeaf`` for layers. The run's mesh is set.

    One array, stacked over its layers, is on the devices at a time where they are random.

    Args:
        model: the architecture.
        seed: of random parameters.
        abstract: the parameters with ``files.leaves()``.
        files: of the parameters.
        params: initial parameters, on the mesh, whose buffers are freed, or in the files already; None: random ones.
    """
    if params is not None:
        return jax.tree.map(put_on_disk, params, abstract)
    files.tier.renew()
    return model.init(jax.random.split(jax.random.key(seed))[0], abstract, put_on_disk)


def initial_streamed_arrays(
    make: Make, logical_axes: dict[str, Any], params: Any, param_files: StateFiles, files: StateFiles
) -> Any:
    """Writes the optimizer state of parameters that are in files, layer by layer; returns it with ``DiskLeaf``.

    Args:
        make: logical axes of a part of the parameters -> its optimizer.
        logical_axes: of all parameters.
        params: with ``DiskLeaf`` for those in ``param_files``. The run's mesh is set.
        param_files, files: of parameters and optimizer state.
    """
    programs: dict[str, Any] = {}

    def arrays(segment: str, given: Any) -> list[jax.Array]:
        if segment not in programs:
            rule, structure = make(part_of(logical_axes, segment)), jax.tree.structure(part_of(params, segment))

            def init(given: Any) -> list[Any]:
                return [x for x in jax.tree.leaves(rule.init(structure.unflatten(given))) if x.ndim]

            programs[segment] = jax.jit(init, out_shardings=[one.sharding for one in files.abstract_rows(segment)])
        return jax.block_until_ready(programs[segment](given))

    def rows(number: int) -> list[jax.Array]:
        unit = files.units[number]
        if not unit.segment:
            return arrays("", jax.tree.leaves(part_of(params, "")))
        own = param_files.units.index(unit)
        found = arrays(unit.segment, param_files.placed(own, param_files.tier.take(own)))
        param_files.tier.release(own, lambda: None)
        return found

    param_files.tier.begin([param_files.units.index(unit) for unit in files.units if unit.segment])
    files.initialise(rows)
    whole, like = make(logical_axes), jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    leaves = jax.tree.leaves(files.leaves())

    def counters() -> list[Any]:
        zeros = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), like)
        return [x for x in jax.tree.leaves(whole.init(zeros)) if not x.ndim]

    made = jax.jit(counters, out_shardings=[leaves[n].sharding for n in files.kept])
    return files.with_kept(made())
