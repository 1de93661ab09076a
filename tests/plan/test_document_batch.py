"""Batches of documents for planning: work of the busiest device, and layouts with context by need."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxllm import cli
from jaxllm.config import ConfigError
from jaxllm.data.context_by_need import ContextSlots, document_lengths
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.plan import layout_search
from jaxllm.plan.document_batch import DocumentBatch, read_lengths
from jaxllm.plan.formulas.device_work import WHOLE, RingShare
from jaxllm.plan.hardware import Cluster
from jaxllm.train.run_slots import token_pairs
from recipes.llama3 import llama3_8b
from sharding import MeshSpec
from tests.train.by_need import drawn_batch, slot_work, static_work

SEQ_LEN = 4096


def run_of(rows: int = 16, seq_len: int = SEQ_LEN, **plan):
    run = llama3_8b()
    data = dataclasses.replace(run.data, batch_size=rows, seq_len=seq_len, packing="documents")
    model = dataclasses.replace(run.model, layers=2)
    return dataclasses.replace(run, model=model, data=data, parallel=ParallelConfig(**plan))


def packed(seed: int, rows: int):
    """A batch as training has it, and the same for planning."""
    batch = drawn_batch(seed, rows, SEQ_LEN, 1.2)
    lengths = [document_lengths(row[None]) for row in batch.segment_ids]
    return batch, DocumentBatch(tuple(tuple(n for n in row if n > 0) for row in lengths), SEQ_LEN)


@pytest.mark.parametrize(("ways", "devices", "micro"), [(1, 4, 2), (2, 2, 4), (4, 1, 1), (2, 8, 1)])
def test_static_work_is_that_of_the_batchs_positions(ways, devices, micro):
    batch, documents = packed(ways, 8 * ways)
    mesh = MeshSpec.parse(f"data={ways},context={devices}")
    run = dataclasses.replace(run_of(8 * ways), accumulate=micro)
    work = static_work(batch, ways, devices, micro)  # pairs of each micro-step and device
    tokens = 8 * ways * SEQ_LEN / (ways * devices)
    found = documents.work(run, mesh)
    assert found.pairs == pytest.approx(work.max(axis=1).sum() / tokens, rel=1e-12)
    assert (found.run, found.rings) == (run, WHOLE)


def test_work_by_need_is_that_of_the_placed_batch():
    batch, documents = packed(3, 16)
    run = dataclasses.replace(run_of(context="by_need"), accumulate=4)
    found = documents.work(run, MeshSpec.parse("data=2,context=4"))
    slots = ContextSlots(2, 4, 2048, SEQ_LEN, 16 * SEQ_LEN, "zigzag", token_pairs(run))
    work = slot_work(slots, batch)
    rings = np.array(slots.place(document_lengths(batch.segment_ids)).rings)
    assert found.pairs == pytest.approx(work.max(axis=1).mean() / 2048, rel=1e-12)
    assert tuple(found.rings) == pytest.approx(((rings - 1).mean() / 3, (rings > 1).mean()))
    assert found.run.accumulate == len(work) == len(rings)
    device = found.on(MeshSpec.parse("data=2,context=4"))
    assert (device.tokens, device.micro_batches) == (2048, len(work))


def test_one_document_a_row_is_the_whole_row():
    documents, run = DocumentBatch(((SEQ_LEN,),) * 8, SEQ_LEN), dataclasses.replace(run_of(8), mesh="data=2,context=4")
    mesh, cluster = MeshSpec.parse(run.mesh), Cluster.parse("v6e:2x4")
    plain, known = (
        layout_search.predict_layout(run, mesh, cluster, documents=d).time.seconds for d in (None, documents)
    )
    assert known == pytest.approx(plain, rel=1e-12)


def test_short_documents_send_no_keys_by_need():
    documents, run = DocumentBatch(((512,) * 8,) * 8, SEQ_LEN), dataclasses.replace(run_of(8), mesh="context=8")
    mesh, cluster = MeshSpec.parse(run.mesh), Cluster.parse("v6e:2x4")
    need = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, context="by_need"))
    work = documents.work(need, mesh)
    assert work.rings == RingShare(0.0, 0.0)
    assert work.pairs == 513 / 2
    ring, by_need = (layout_search.predict_layout(one, mesh, cluster, documents=documents) for one in (run, need))
    assert by_need.time.seconds < ring.time.seconds
    assert by_need.time.flops == ring.time.flops < layout_search.predict_layout(run, mesh, cluster).time.flops


def test_the_plan_takes_document_lengths(tmp_path, capsys):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(["32768", *["1500"] * 60]))
    asked = ["--on", "v5p:2x2x1", "--no-compile", "--top", "40", "--explain", "1", "--documents", str(lengths)]
    asked += ["--model.layers", "2", "--data.batch-size", "2", "--data.seq-len", "32768"]
    assert cli.main(["plan", "llama3_8b", *asked, "--data.packing", "documents"]) == 0
    said = capsys.readouterr().out
    assert "context by need" in said


def test_lengths_that_are_none_are_refused(tmp_path):
    (tmp_path / "words.txt").write_text("12 many")
    with pytest.raises(ConfigError, match="whole numbers of tokens"):
        read_lengths(tmp_path / "words.txt")
    with pytest.raises(ConfigError, match="cannot read"):
        read_lengths(tmp_path / "none.txt")
    for none in ((), (1, 5)):
        with pytest.raises(ConfigError, match="2 or more"):
            DocumentBatch.drawn(none, run_of())
