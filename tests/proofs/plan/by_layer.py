"""The search by layer against all assignments of layouts and remat policies to layers, one after the other."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig, MoeConfig
from jaxllm.plan import layout_search
from jaxllm.plan.by_layer import layer_search
from jaxllm.plan.by_layer.layer_costs import LayerChoice
from jaxllm.plan.formulas import memory_estimate, step_time
from jaxllm.plan.formulas.layer_parts import layered_work
from jaxllm.plan.hardware import TABLE, Cluster
from jaxllm.train import RunConfig
from recipes.llama3 import llama3_8b
from sharding import MeshSpec
from sharding.layer_layouts import LAYOUTS
from tests.proofs.harness import proof

MESHES = (
    "tensor=8", "data=2,tensor=4", "fsdp=2,tensor=4", "fsdp=4,tensor=2", "expert=2,tensor=4", "expert=4,tensor=2",
    "context=2,tensor=4", "data=2,fsdp=2,tensor=2", "fsdp=8", "expert=2,fsdp=2,tensor=2",
)  # fmt: skip
KINDS = ("dense", "mixture", "dense, then mixtures", "local and global", "wide, then narrow")


def drawn(seed: int) -> tuple[RunConfig, MeshSpec, Cluster]:
    """A run of three or four groups of layers, eight devices, and memory that some of its plans fit."""
    draw = random.Random(seed)
    mesh = MeshSpec.parse(draw.choice(MESHES))
    attention = AttentionConfig(heads=draw.choice((8, 16)), kv_heads=8, head_dim=128)
    dense = BlockConfig(attention, MlpConfig(hidden=draw.choice((2048, 4096))))
    mixture = dataclasses.replace(dense, mlp=MoeConfig(draw.choice((8, 16)), draw.choice((1, 2)), 1024))
    kind = draw.choice(KINDS)
    if "expert" in str(mesh):
        kind = draw.choice(("mixture", "dense, then mixtures"))
    local = dataclasses.replace(dense, attention=dataclasses.replace(attention, window=512))
    wide = dataclasses.replace(dense, mlp=MlpConfig(hidden=8192))
    prefix, pattern = {
        "dense": ((), (dense,)),
        "mixture": ((), (mixture,)),
        "dense, then mixtures": ((dense,) * draw.choice((1, 2)), (mixture,)),
        "local and global": ((), (local, dense)),
        "wide, then narrow": ((wide,) * draw.choice((1, 2)), (dense,)),
    }[kind]
    groups = draw.choice((3, 3, 3, 4))
    model = DecoderConfig(
        vocab_size=draw.choice((4096, 32768)),
        embed_dim=draw.choice((1024, 2048)),
        layers=groups * len(pattern),
        prefix=prefix,
        pattern=pattern,
        tied=draw.random() < 0.3,
        dtype="bfloat16",
    )
    run = llama3_8b()
    data = dataclasses.replace(run.data, seq_len=draw.choice((1024, 4096)), batch_size=draw.choice((8, 16, 32)))
    on = draw.choice(("h100:1x8", "v6e:2x4", "v5e:2x4"))
    name = on.split(":")[0]
    own = dataclasses.replace(TABLE[name], link=TABLE[name].link * draw.choice((0.03, 0.1, 0.3, 1.0)))
    run = dataclasses.replace(run, model=model, data=data, mesh=str(mesh))
    run = draw.choice(list(layout_search.plain_layouts(run, mesh))[:2])
    cluster = Cluster.parse(on, {name: own})
    sizes = [
        layout_search.predict_layout(laid, mesh, cluster).memory.total
        for laid in (of_remat(run, "none"), of_remat(run, "full"))
    ]
    least = min(sizes)
    room = layout_search.ROOM[cluster.topology.platform]
    memory = round((least + draw.uniform(-0.05, 1.05) * abs(sizes[0] - sizes[1])) / room)
    return run, mesh, Cluster.parse(on, {name: dataclasses.replace(own, hbm_bytes=memory)})


def of_remat(run: RunConfig, remat: str) -> RunConfig:
    """The run with one remat policy."""
    return dataclasses.replace(run, model=dataclasses.replace(run.model, remat=remat))


def fastest_of_all(run: RunConfig, mesh: MeshSpec, cluster: Cluster) -> float:
    """Least predicted seconds of all assignments that fit and train; infinite if none does."""
    layouts = LAYOUTS if dict(mesh.axes).get("tensor", 1) > 1 else ("tensor",)
    choices = [LayerChoice(*pair) for pair in itertools.product(layouts, layout_search.REMATS)]
    groups, fastest = sum(repeats for _, repeats in run.model.segments), math.inf
    legal: dict[str, bool] = {}
    for plan in itertools.product(choices, repeat=groups):
        laid = layer_search.with_choices(run, plan)
        if not legal.setdefault(laid.parallel.layers, layout_search.is_legal(laid, mesh)):
            continue
        work = layered_work(laid, mesh)
        if memory_estimate.predict_work(work, cluster.topology).total <= layout_search.memory_limit(cluster):
            fastest = min(fastest, step_time.predict_work(work, cluster).seconds)
    return fastest


@proof("plan", count=120, sample=1, bound=1e-9)
def layers_are_brute_force(seed: int) -> float:
    """Step time of the dynamic program's plan over that of the fastest of all assignments that fit, less one."""
    run, mesh, cluster = drawn(seed)
    fastest = fastest_of_all(run, mesh, cluster)
    found = layer_search.fastest_by_layer(run, mesh, cluster)
    if found is None:
        assert math.isinf(fastest), f"{fastest} s fit, and the search found nothing"
        return 0.0
    assert found.fits
    return abs(found.time.seconds / fastest - 1)
