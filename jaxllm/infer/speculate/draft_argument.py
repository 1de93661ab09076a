"""Argument of the proposer ``draft``: the draft model, its layers in parallel, and the devices that it is on.

On devices of its own (Dovetail, arXiv:2412.18934, places draft and served model on different ones) the draft's weights
and KV cache take no memory of the served model's. The number of drafted tokens follows the measured times of both, see
``draft_length``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import jax

import sharding
from jaxllm.infer.speculate.draft_model import DraftModelProposer, ServedModel, load_draft_model
from jaxllm.infer.speculate.layer_parallel_draft import LayerParallelProposer

SHARED_BY_REPLICAS = ("data", "fsdp", "expert")
"""Mesh axes over which sequences are split."""


@dataclass(frozen=True)
class DraftArgument:
    """Argument of the proposer ``draft``.

    Attributes:
        name: draft model.
        parallel: layers that run at once while tokens are drafted, see ``layer_parallel_draft``; 1: none do.
        devices: first and last of the devices that it is on, by their place in ``jax.devices()``; None: the served
            model's.
    """

    name: str
    parallel: int = 1
    devices: tuple[int, int] | None = None


def parse_draft(text: str) -> DraftArgument:
    """Argument from the text after ``draft:``.

    Raises:
        ValueError: there is no model, or an option or its value is not legal.
    """
    name, *options = text.split(",")
    given = {key: value for key, _, value in (option.partition("=") for option in options)}
    parallel, devices = given.get("parallel", "1"), re.fullmatch(r"(\d+)(?:-(\d+))?", given.get("devices", "0"))
    legal = set(given) <= {"parallel", "devices"} and len(given) == len(options)
    if not name or not legal or not parallel.isdecimal() or int(parallel) < 1 or devices is None:
        raise ValueError(
            f"draft:{text}; give a draft model, such as draft:smollm2 or draft:runs/small, and after it what of "
            "parallel=N (layers that run at once, 1 or more) and devices=A-B (numbers of devices) you need."
        )
    first, last = int(devices[1]), int(devices[2] or devices[1])
    return DraftArgument(name, int(parallel), (first, last) if "devices" in given else None)


def load_draft(argument: DraftArgument, served: ServedModel) -> DraftModelProposer | LayerParallelProposer:
    """Loads a draft model and makes its proposer.

    Raises:
        ValueError: there are no such devices, or they do not go with the served model's mesh; see also
            ``load_draft_model``, ``DraftModelProposer`` and ``LayerParallelProposer``.
    """
    own = None if argument.devices is None else devices_of(argument.devices, served)
    if argument.parallel > 1:
        devices = own or [next(iter(jax.tree.leaves(served.params)[0].devices()))]
        model, params = load_draft_model(argument.name, served, sharding.MeshSpec.parse("dp").build(devices[:1]))
        return LayerParallelProposer(model, params, served, argument.parallel, devices)
    if own is None:
        return DraftModelProposer(*load_draft_model(argument.name, served), served)
    mesh = sharding.MeshSpec.parse(f"tensor={len(own)}").build(own)
    return DraftModelProposer(*load_draft_model(argument.name, served, mesh), replace(served, mesh=mesh))


def devices_of(numbers: tuple[int, int], served: ServedModel) -> list[jax.Device]:
    """Devices of a draft model.

    Args:
        numbers: places of the first and the last in ``jax.devices()``.

    Raises:
        ValueError: there are no such devices, or the served model has replicas.
    """
    (first, last), there = numbers, jax.devices()
    if not first <= last < len(there):
        raise ValueError(
            f"speculate: devices={first}-{last} of a draft model; there are devices 0 to {len(there) - 1}."
        )
    shape = {} if served.mesh is None else served.mesh.shape
    if split := [f"{axis}={shape[axis]}" for axis in SHARED_BY_REPLICAS if shape.get(axis, 1) > 1]:
        raise ValueError(
            f"speculate: devices of a draft model do not go with {split[0]}, whose replicas have sequences of their "
            "own: split the served model over tensor alone, or leave devices out."
        )
    return there[first : last + 1]
