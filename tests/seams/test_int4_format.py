"""Int4, one new file and one row: a packed format of dense matrices, sharded over tensor and fsdp, and served."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.checkpoint import CheckpointConfig, Checkpointer
from jaxllm.convert.load import load_model
from jaxllm.hub import HubError
from jaxllm.hub.huggingface import HubModel, export_hf
from jaxllm.infer import Engine, EngineConfig, SamplingParams
from jaxllm.infer.runner.serving_mesh import placements, serving_model
from jaxllm.models import PackedWeight, functional
from jaxllm.models.packed_weight import is_packed
from jaxllm.quant import WEIGHT_FORMATS, pack_params, packed_shapes
from jaxllm.quant.formats.format_table import VOCABULARY_FORMAT
from jaxllm.train import train, value_and_grad
from sharding import MeshSpec, ShardingError
from tests import quick, tiny
from tests.infer import engines
from tests.seams.int4_format import Int4
from tests.seams.seam_files import files_that_name
from tests.train import runs

WEIGHT_FORMATS["nibbles"] = Int4  # the row

CONFIG = tiny.decoder(vocab_size=engines.VOCAB, embed_dim=32, heads=4, kv_heads=2, head_dim=16, mlp=64, tied=False)
MODEL = functional(CONFIG)


def packed() -> Any:
    return pack_params(MODEL, jax.tree.map(jnp.asarray, quick.params(CONFIG, scale=0.5)), "nibbles")


def dense(params: Any) -> Any:
    """The parameters that packed ones stand for."""
    return jax.tree.map(lambda x: x.dense(np.float64) if is_packed(x) else x, params, is_leaf=is_packed)


@pytest.mark.drawn(1)
def test_matrices_are_rounded_by_half_a_step_at_most(float64):
    params = quick.params(CONFIG, scale=0.5)
    kept = pack_params(MODEL, jax.tree.map(jnp.asarray, params), "nibbles")
    names = jax.tree_util.tree_leaves_with_path(kept, is_leaf=is_packed)
    assert sum(is_packed(leaf) for _, leaf in names) == 9  # with embedding and head, which are int8
    assert jax.tree.structure(kept) == jax.tree.structure(packed_shapes(MODEL, "nibbles"))
    for whole, few in zip(jax.tree.leaves(params), jax.tree.leaves(kept, is_leaf=is_packed), strict=True):
        if not is_packed(few):
            np.testing.assert_array_equal(few, whole)
            continue
        if not isinstance(few.format, Int4):
            assert few.format == VOCABULARY_FORMAT
            continue
        error = np.abs(np.asarray(few.dense(np.float64)) - whole)
        assert few.shape == whole.shape
        assert error.max() <= 1.01 * np.abs(whole).max() / 14
        assert error.mean() > 1e-3 * np.abs(whole).mean(), "it is rounded"
        assert few.nbytes == whole.size // 2 + 2 * whole.size // 16


def served_error(mesh: str, config: EngineConfig, rng: np.random.Generator) -> float:
    """Error of log-probabilities served with packed weights on a mesh, against the forward pass of dense ones."""
    params = packed()
    spec = MeshSpec.parse(mesh)
    there = spec.build(jax.devices()[: spec.abstract().size])
    asked = [
        {
            "prompt": rng.integers(0, engines.VOCAB, n).tolist(),
            "params": SamplingParams(max_tokens=6, temperature=0.0, logprobs=0),
        }
        for n in (3, 12, 17)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        engine = Engine.of(MODEL, params, config, mesh=there, strict=True)
    made = engines.serve(engine, asked)
    texts = np.zeros((len(made), 24), np.int32)
    for row, request in zip(texts, made, strict=True):
        row[: len(request.sequences[0].tokens)] = request.sequences[0].tokens
    scores = np.asarray(jax.nn.log_softmax(quick.logits(CONFIG, dense(params), texts)))
    worst = 0.0
    for row, request in zip(scores, made, strict=True):
        (own,), begin = request.sequences, len(request.prompt)
        assert own.tokens[begin:] == row[begin - 1 : len(own.tokens) - 1].argmax(-1).tolist()
        wanted = row[np.arange(begin - 1, len(own.tokens) - 1), own.tokens[begin:]]
        worst = max(worst, float(np.abs(wanted - own.logprobs).max()))
    return worst


@pytest.mark.drawn(0.3)
def test_served_sharded_as_its_dense_weights(rng, float64):
    """Split over tensor and fsdp; on other meshes: `make proof seams ONLY=packed_weights_are_served`."""
    sizes = dataclasses.replace(engines.ENGINES["tight, swap"], max_sequences=1, decode_steps=1)
    assert served_error("fsdp=2,tensor=2", sizes, rng) <= 1e-10


def test_a_device_has_its_part_of_values_and_scales():
    mesh = MeshSpec.parse("fsdp=2,tensor=2").build(jax.devices()[:4])
    params = packed()
    for leaf, place in zip(
        jax.tree.leaves(params, is_leaf=is_packed),
        jax.tree.leaves(placements(serving_model(MODEL), params, mesh), is_leaf=is_packed),
        strict=True,
    ):
        if isinstance(leaf, PackedWeight) and leaf.format == VOCABULARY_FORMAT:
            assert np.prod(place.values.shard_shape(leaf.values.shape)) == leaf.values.size // 4
            assert place.scales.shard_shape(leaf.scales.shape) == (len(leaf.scales) // 2, 1, 1)  # one for all inputs
        elif isinstance(leaf, PackedWeight):
            for x, there in ((leaf.values, place.values), (leaf.scales, place.scales)):
                assert np.prod(there.shard_shape(x.shape)) == x.size // 4
    with pytest.raises(ShardingError, match="parameter"):  # 32 / 16 = 2 scales along embed cannot be split 8 ways
        placements(serving_model(MODEL), params, MeshSpec.parse("fsdp=8").build())


@pytest.mark.drawn(0.3)
def test_a_run_is_loaded_in_it_and_neither_trained_nor_exported(tmp_path):
    run = runs.run_config(tmp_path, steps=2)
    model = tiny.decoder(vocab_size=280, head_dim=16, layers=1, dtype="float32")
    directory = train(dataclasses.replace(run, model=model)).directory
    loaded = load_model(directory, weights="nibbles")
    plain = load_model(directory)
    gate, whole = (m.params["segments"]["0"]["0"]["mlp"]["gate"] for m in (loaded, plain))
    assert isinstance(gate.format, Int4)
    assert np.abs(np.asarray(gate.dense(np.float32)) - whole).max() <= np.abs(whole).max() / 13
    with pytest.raises(NotImplementedError, match=r"packed \(quantised\) and have no gradients"):
        value_and_grad(loaded.model)(loaded.params, tiny.batch(0, 2, 8, 40, packed=False))
    with pytest.raises(HubError, match=r"give one of auto, plain, packed, .*nibbles\. Did you mean 'nibbles'"):
        load_model(directory, weights="nibble")
    narrow = functional(dataclasses.replace(CONFIG, embed_dim=24, dtype="float32", param_dtype="float32"))
    with pytest.raises(ValueError, match=r"attention/k: int4: 16 values share a scale, but 24 is no multiple of 16\."):
        packed_shapes(narrow, "nibbles")


def test_saved_as_it_is_and_restored_over_a_mesh(tmp_path):
    params, mesh = packed(), MeshSpec.parse("fsdp=2,tensor=2").build(jax.devices()[:4])
    abstract = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        params,
        placements(serving_model(MODEL), params, mesh),
    )
    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig(saving="blocking")) as checkpointer:
        checkpointer.save(1, {"params": params}, {})
        restored, _ = checkpointer.restore_params(abstract)
    assert jax.tree.structure(restored) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, restored, params)
    gate = restored["segments"]["0"]["0"]["mlp"]["gate"]
    assert gate.values.sharding.shard_shape(gate.values.shape) == (2, 8, 32)


def test_refused_at_export(tmp_path):
    with pytest.raises(HubError, match="weights are packed, which no published format has"):
        export_hf(HubModel(CONFIG, packed(), {"model_type": "llama"}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_file_and_one_row():
    assert files_that_name("Int4") == {"tests/seams/int4_format.py", "tests/seams/test_int4_format.py"}
