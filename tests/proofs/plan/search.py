"""The layout search against all of its space, one layout after the other: the same fastest layout on eight devices."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator

from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig, MoeConfig, functional
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.plan import layout_search
from jaxllm.plan.document_batch import DocumentBatch
from jaxllm.plan.hardware import TABLE, Cluster
from jaxllm.train import RunConfig
from jaxllm.train.combinations import check_combinations
from jaxllm.train.run import check_batch, fitting_mesh
from recipes.llama3 import llama3_8b
from sharding import MeshSpec
from tests.proofs.harness import proof

NAMES = ("data", "stage", "fsdp", "context", "expert", "tensor")
POWERS = (1, 2, 4, 8)


def drawn(seed: int) -> tuple[RunConfig, Cluster, DocumentBatch | None]:
    """A run, dense or a mixture of experts, and eight devices; memory that some layouts fill; documents, or none."""
    draw = random.Random(seed)
    attention = AttentionConfig(heads=draw.choice((8, 16)), kv_heads=draw.choice((2, 8)), head_dim=128)
    mixture = MoeConfig(draw.choice((4, 8, 16)), draw.choice((1, 2)), draw.choice((512, 1536)))
    mlp = mixture if draw.random() < 0.75 else MlpConfig(hidden=draw.choice((2048, 4096)))
    model = DecoderConfig(
        vocab_size=draw.choice((4096, 32768)),
        embed_dim=draw.choice((1024, 2048)),
        layers=draw.choice((4, 6, 8)),
        pattern=(BlockConfig(attention, mlp),),
        tied=False,
        dtype="bfloat16",
    )
    run = llama3_8b()
    length = draw.choice((2048, 32_768))
    data = dataclasses.replace(run.data, seq_len=length, batch_size=draw.choice((4, 8) if length > 4096 else (8, 16)))
    on = draw.choice(("h100:1x8", "h100:2x4", "v6e:2x4"))
    kind = on.split(":")[0]
    memory = round(draw.choice((2, 6, 20, 60)) * 2**30)
    table = {kind: dataclasses.replace(TABLE[kind], hbm_bytes=memory, link=TABLE[kind].link * draw.choice((0.1, 1.0)))}
    run = dataclasses.replace(run, model=model, data=data)
    lengths = [min(length, 2 + int(draw.lognormvariate(7.5, 1.5))) for _ in range(500)]
    documents = DocumentBatch.drawn(lengths, run, seed) if draw.random() < 0.5 else None
    return run, Cluster.parse(on, table), documents


def meshes(run: RunConfig, documents: DocumentBatch | None) -> Iterator[MeshSpec]:
    """All meshes of eight devices over the axes of the space.

    These are ``context`` for long rows and for known documents, ``expert`` for mixtures, and others for all.
    """
    for sizes in itertools.product(POWERS, repeat=len(NAMES)):
        size = dict(zip(NAMES, sizes, strict=True))
        short = run.data.seq_len < layout_search.LONG_ROW and documents is None
        dense = not run.model.mixtures
        if math.prod(sizes) == 8 and not (short and size["context"] > 1) and not (dense and size["expert"] > 1):
            yield MeshSpec(tuple((name, n) for name, n in size.items() if n > 1))


def plans(run: RunConfig, mesh: MeshSpec, documents: DocumentBatch | None) -> Iterator[RunConfig]:
    """All layouts on a mesh that training accepts; of pipelines those of at least two micro-batches for each stage."""
    size = dict(mesh.axes)
    stages, sequence = size.get("stage", 1), size.get("tensor", 1) > 1
    rows = run.data.batch_size // math.prod(size.get(name, 1) for name in ("data", "fsdp", "expert"))
    foldings = [f"expert={a},tensor={b}" for a in POWERS for b in POWERS] if run.model.mixtures else []
    schedules = ("1f1b",) if stages == 1 else ("1f1b", "interleaved", "gis", "zb_h1")
    contexts = ("ring", "by_need") if documents and size.get("context", 1) > 1 == stages else ("ring",)
    for experts, schedule, accumulate, context in itertools.product(
        ("", *foldings), schedules, (1, 2, 4, 8, 16), contexts
    ):
        if not rows or rows % accumulate or (stages > 1 and accumulate < min(rows, 2 * stages)):
            continue
        plan = ParallelConfig(sequence=sequence, experts=experts, schedule=schedule, context=context)  # type: ignore[arg-type]
        laid = dataclasses.replace(run, mesh=str(mesh), accumulate=accumulate, parallel=plan)
        try:
            check_combinations(laid, size)
            model = functional(laid.model, plan.rules())
            fitting_mesh(laid, model, 8)
            check_batch(laid, mesh.abstract(), model.rules)
            if stages > 1:
                layout_search.stage_depths(laid, stages)
        except ValueError:
            continue
        shares = layout_search.OFFLOADS if schedule == "1f1b" and stages > 1 else (0.0,)
        for zero, remat, share in itertools.product((1, 2, 3), layout_search.REMATS, shares):
            if stages > 1 and zero == 1:
                continue
            yield dataclasses.replace(
                laid,
                parallel=dataclasses.replace(plan, zero=zero, offload=share),  # type: ignore[arg-type]
                model=dataclasses.replace(laid.model, remat=remat),  # type: ignore[arg-type]
            )


@proof("plan", count=40, sample=1, bound=1e-9)
def search_is_brute_force(seed: int) -> float:
    """Step time of the search's first layout over that of the fastest of all that fit, less one."""
    run, cluster, documents = drawn(seed)
    found = layout_search.search(run, cluster, documents=documents).layouts
    fastest = math.inf
    for mesh in meshes(run, documents):
        if cluster.topology.platform == "gpu" and dict(mesh.axes).get("tensor", 1) > cluster.topology.shape[-1]:
            continue  # not over the network between nodes
        for laid in plans(run, mesh, documents):
            layout = layout_search.predict_layout(laid, mesh, cluster, documents=documents)
            if layout.fits:
                fastest = min(fastest, layout.time.seconds)
    if not found:
        assert math.isinf(fastest)
        return 0.0
    return abs(found[0].time.seconds / fastest - 1)
