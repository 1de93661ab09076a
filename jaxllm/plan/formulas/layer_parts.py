"""Parts of a run whose layers differ in their layout or remat policy: each is the work of layers that are alike.

A step's compute, HBM traffic and saved activations are sums over parts; its working memory is that of the layout whose
layers need most (Galvatron, arXiv:2211.13878, section 4).
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from jaxllm.models.functional import layouts_by_segment
from jaxllm.models.remat import parse, policies_by_segment
from jaxllm.parallel.pipeline.stage_split import Remat
from jaxllm.plan.formulas.device_work import (
    DeviceWork,
    architecture,
    device_weights,
    local_size,
    rules_in_layers,
    rules_of,
    ways_over,
    with_remat,
)
from jaxllm.train import RunConfig
from sharding import MeshSpec
from sharding.layer_layouts import AXIS


def differs_by_layer(run: RunConfig) -> bool:
    """Whether a run has layouts by layer, or several remat policies."""
    return bool(run.parallel.layouts()) or len(parse(run.model.remat)) > 1


def layered_work(run: RunConfig, mesh: MeshSpec) -> DeviceWork:
    """Work of a run whose mesh is legal, with parts where its layers differ.

    Raises:
        NotImplementedError: the cost model does not support the run; names what it supports.
    """
    if not differs_by_layer(run):
        return DeviceWork.of(run, mesh)
    check_by_layer(run, mesh)
    parallel = replace(run.parallel, layers=AXIS)
    whole = DeviceWork.of(replace(run, parallel=parallel, model=with_remat(run.model, "full")), mesh)
    segments = range(len(run.model.segments))
    counts: dict[tuple[str, str], list[int]] = {}
    for segment, own in enumerate(pieces(run)):
        for layout, policy, repeats in own:
            counts.setdefault((layout, policy), [0 for _ in segments])[segment] += repeats
    parts = [layer_part(run, mesh, layout, policy, tuple(repeats)) for (layout, policy), repeats in counts.items()]
    return replace(whole, run=run, parts=(end_part(run, mesh), *parts))


def check_by_layer(run: RunConfig, mesh: MeshSpec) -> None:
    """Checks that the cost model has formulas for a run's layers, where they differ.

    Raises:
        NotImplementedError: names what is supported.
    """
    for policy, _ in parse(run.model.remat):
        if policy not in get_args(Remat):
            raise NotImplementedError(
                f'model.remat = "{run.model.remat}": by layer, the cost model supports {", ".join(get_args(Remat))}.'
            )
    if run.parallel.layouts() and run.parallel.zero != 3:
        raise NotImplementedError(
            f"layouts by layer with parallel.zero = {run.parallel.zero}: the cost model supports 3."
        )
    if dict(mesh.axes).get("stage", 1) > 1:
        raise NotImplementedError(
            f'model.remat = "{run.model.remat}" on the mesh {mesh}: the cost model supports one policy for all stages.'
        )


def pieces(run: RunConfig) -> list[list[tuple[str, str, int]]]:
    """Runs of each segment's groups that are alike, in order: layout, remat policy, repeats."""
    config = run.model
    policies = policies_by_segment(config.remat, config.segments)
    layouts = layouts_by_segment(rules_of(run.parallel), config)
    found = []
    for own, ways in zip(policies, layouts, strict=True):
        columns = [[value for value, count in one for _ in range(count)] for one in (ways, own)]
        of_segment: list[tuple[str, str, int]] = []
        for layout, policy in zip(*columns, strict=True):
            same = of_segment and of_segment[-1][:2] == (layout, policy)
            count = of_segment.pop()[2] if same else 0
            of_segment.append((layout, policy, count + 1))
        found.append(of_segment)
    return found


def layer_part(run: RunConfig, mesh: MeshSpec, layout: str, policy: str, repeats: tuple[int, ...]) -> DeviceWork:
    """Work of layers that are alike.

    Args:
        run: the run.
        mesh: its mesh.
        layout: of the layers (``sharding.layer_layouts``).
        policy: their remat policy.
        repeats: number of them in each segment, in repeats of its group of blocks.
    """
    parallel, abstract, sizes = replace(run.parallel, layers=AXIS), mesh.abstract(), dict(mesh.axes)
    stored = rules_of(parallel).on(abstract)
    rules = rules_in_layers(stored, layout)
    weights = []
    for weight in device_weights(architecture(run.model), stored, mesh, run.adapter, layout):
        path = weight.name.split("/")
        if path[0] == "segments" and (layers := repeats[int(path[1])]):
            weights.append(replace(weight, layers=layers))
    shape = (run.data.batch_size // run.accumulate, run.data.seq_len)
    split = sizes.get("features", 1)
    return DeviceWork(
        replace(run, parallel=parallel, model=with_remat(run.model, policy)),
        mesh,
        tuple(weights),
        local_size(rules, mesh, ("batch", "seq"), shape),
        local_size(rules, mesh, ("batch", "residual_seq"), shape),
        run.data.seq_len,
        sizes.get("tensor", 1) * split if layout == AXIS else 1,
        local_size(rules, mesh, ("expert_batch", "expert_seq"), shape),
        ways_over(abstract, rules.mesh_axes("expert_mlp")),
        1,
        run.accumulate,
        features=split,
        layout=layout,
        repeats=repeats,
    )


def end_part(run: RunConfig, mesh: MeshSpec) -> DeviceWork:
    """Work outside layers, of embedding and head."""
    none = layer_part(run, mesh, AXIS, "full", (0,) * len(run.model.segments))
    rules = rules_of(replace(run.parallel, layers=AXIS)).on(mesh.abstract())
    weights = device_weights(architecture(run.model), rules, mesh, run.adapter)
    return replace(none, weights=tuple(w for w in weights if not w.name.startswith("segments/")))


def full_or_none(remat: str) -> str:
    """Policies with "none" in place of all but "full", which send what "none" sends."""
    found: list[tuple[str, int | None]] = []
    for policy, count in parse(remat):
        name = "full" if policy == "full" else "none"
        if found and found[-1][0] == name:
            before = found.pop()[1] or 0
            count = None if count is None else before + count
        found.append((name, count))
    if len(found) == 1:
        return found[0][0]
    return ",".join(name if count is None else f"{name}={count}" for name, count in found)
