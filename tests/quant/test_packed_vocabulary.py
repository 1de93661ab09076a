"""Packed embeddings and output matrices: rows that are looked up, logits, bytes, meshes, files and adapters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Ggml

from jaxllm.convert import load
from jaxllm.hub import open_source
from jaxllm.hub.gguf.gguf_codes import CODE_KINDS
from jaxllm.hub.stored_codes import pack_rows
from jaxllm.models import functional, packed_weight
from jaxllm.models.attention_context import Segments
from jaxllm.models.packed_weight import PackedWeight, is_packed
from jaxllm.peft.adapter import Adapter, adapted_params
from jaxllm.plan.formulas.serving_step import vocabulary_bytes
from jaxllm.quant import describe_packed, pack_params
from jaxllm.quant.formats.code_groups import CodeGroups
from jaxllm.quant.grids import MinimumGrid
from jaxllm.serve.utilisation import weight_bytes
from pallas_kernels._compat import TargetDevice
from pallas_kernels.packed_matmul import native
from sharding import MeshSpec, abstract_params, shardings_of
from sharding.isolate import run_isolated
from tests import environment, quick, tiny
from tests.hub import gguf_writer
from tests.hub.test_stored_codes import gguf_tensor
from tests.quant.test_code_groups import GRIDS

TOKENS = np.arange(12, dtype=np.int32).reshape(2, 6) * 5


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
@pytest.mark.parametrize(("group", "tile"), [(16, 2**21), (None, 40 * 8 * 7), (12, 40 * 8 * 29)])
def test_rows_and_logits_are_those_of_the_dense_matrix(grid, group, tile, rng, float64, monkeypatch):
    """Rows a few at a time too, with a rest; groups that are shorter or cut a tuple."""
    monkeypatch.setitem(packed_weight.TILE_BYTES, "cpu", tile)
    form = CodeGroups(grid, group, -1)
    weight = jnp.asarray(rng.normal(size=(29, 40)) + 0.2)
    packed = PackedWeight(*form.pack(weight), form)
    dense = np.asarray(packed.dense(jnp.float64))
    assert np.abs(dense - weight).max() > 1e-3
    x, ids = rng.normal(size=(2, 3, 40)), rng.integers(0, 29, (2, 5))
    got = jax.jit(lambda x: packed.logits(x, ("batch", "seq", "act_vocab")))(jnp.asarray(x))
    np.testing.assert_allclose(got, x @ dense.T, rtol=0, atol=1e-12)
    rows = jax.jit(lambda ids: packed.lookup(ids, jnp.float64, ("batch", "residual_seq", "act_embed")))(ids)
    np.testing.assert_array_equal(rows, dense[ids])


@pytest.mark.parametrize(("rows", "group"), [(64, 8), (64, None), (29, 8)])
def test_rows_of_whole_tiles(rows, group, rng, monkeypatch):
    """TPUs look up tiles of 32 rows of bytes, and take a row of each; a table that has others is looked up as ever."""
    form = CodeGroups(MinimumGrid(4), group, -1)
    packed = PackedWeight(*form.pack(jnp.asarray(rng.normal(size=(rows, 16)))), form)
    ids = rng.integers(0, rows, (2, 5))
    want = packed.lookup(jnp.asarray(ids), jnp.float32, ("batch", "seq", "act_embed"))
    monkeypatch.setattr(packed_weight, "target_device", lambda: TargetDevice("tpu", "TPU Test"))
    taken: list[tuple[int, ...]] = []
    take = packed_weight.sharding.take
    monkeypatch.setattr(packed_weight.sharding, "take", lambda x, *a, **k: taken.append(x.shape) or take(x, *a, **k))
    got = packed.lookup(jnp.asarray(ids), jnp.float32, ("batch", "seq", "act_embed"))
    np.testing.assert_array_equal(got, want)
    assert taken[0] == ((rows // 32, 32, 8) if rows == 64 else (rows, 8))


def test_other_rows_are_not_dequantised():
    """No value of the lookup is as large as the matrix, but its codes."""
    form = CodeGroups(MinimumGrid(4), 8, -1)
    packed = PackedWeight(*form.pack(jnp.ones((512, 16))), form)

    def rows(packed: PackedWeight) -> Any:
        return packed.lookup(jnp.zeros((1, 4), jnp.int32), jnp.float32, (None, None, None))

    sizes = [v.aval.size for eqn in jax.make_jaxpr(rows)(packed).eqns for v in eqn.outvars]
    assert max(sizes) <= 4 * 16


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("tied", "mesh"), [(True, "tensor=4"), (False, "fsdp=2,tensor=2"), (True, "data=2,fsdp=2")])
def test_a_sharded_vocabulary_is_that_of_one_device(tied, mesh, float64):
    """With a soft cap; every device holds its part of the rows, and packs it by itself."""
    config = tiny.decoder(embed_dim=64, head_dim=16, mlp=128, layers=1, tied=tied, logit_softcap=4.0)
    model, spec = functional(config), MeshSpec.parse(mesh)
    built = spec.build(jax.devices()[:4])

    def logits(params: Any, tokens: Any) -> Any:
        hidden, _ = model.forward(params, tokens, jnp.broadcast_to(jnp.arange(6), tokens.shape), Segments())
        return model.head(params, hidden)

    with jax.set_mesh(built):
        abstract = abstract_params(model.abstract(), model.logical_axes(), built, model.rules)
        packed = pack_params(model, model.init(jax.random.key(0), shardings_of(abstract)), "int4")
        batch = jax.NamedSharding(built, model.rules.spec(("batch", "seq"), built))
        tokens = jax.device_put(np.tile(TOKENS, (2, 1)), batch)
        got = np.asarray(jax.jit(logits)(packed, tokens))
    tables = [packed["embedding"]["table"]] + ([] if tied else [packed["head"]["weight"]])
    split = built.shape.get("tensor", 1) * built.shape.get("fsdp", 1)
    for table in tables:
        assert table.values.addressable_shards[0].data.size == table.values.size // split
    alone = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), packed)
    dense = jax.tree.map(lambda x: x.dense(jnp.float64) if is_packed(x) else x, alone, is_leaf=is_packed)
    want = np.asarray(jax.jit(logits)(dense, jnp.asarray(np.tile(TOKENS, (2, 1)))))
    assert np.abs(want).max() > 0.5
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(("topology", "bits"), [("v6e:1x1", 4), ("h100:1x1", 8)])
def test_the_dense_matrix_is_not_written_on_accelerators(topology, bits):
    """Temporaries of the logits, compiled for a device, are a small part of the dense matrix's bytes."""
    options = {"rows": 65536, "bits": bits}
    found = run_isolated("tests.quant.packed_programs:compile_head_on", topology, options)
    assert found["temp_bytes"] < found["dense_bytes"] / 8


@pytest.mark.drawn(3)
@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_memory_and_of_the_compiled_program(tied):
    """A byte for every value and four for every row, in memory and in the arguments of the program; and by formula."""
    config = tiny.decoder(vocab_size=96, embed_dim=64, head_dim=16, layers=1, tied=tied, dtype="float32")
    model, tokens = functional(config), jnp.zeros((1, 2), jnp.int32)
    whole = jax.tree.map(jnp.asarray, quick.params(config))
    packed = pack_params(model, whole, "int8")
    matrices = [packed["embedding"]["table"]] + ([] if tied else [packed["head"]["weight"]])
    assert {one.nbytes for one in matrices} == {96 * (64 + 4)}
    assert vocabulary_bytes("int8", 4, 64) == (64 + 4) / 64

    def arguments(params: Any) -> int:
        step = jax.jit(lambda p: model.head(p, model.forward(p, tokens, tokens, Segments())[0]))
        return step.lower(params).compile(environment.AS_EVER).memory_analysis().argument_size_in_bytes  # type: ignore[union-attr]

    both = [sum(x.nbytes for x in jax.tree.leaves(params)) for params in (whole, packed)]
    assert arguments(whole) - arguments(packed) == both[0] - both[1]
    looked_up = 0 if tied else matrices[0].nbytes
    assert weight_bytes(config, packed) == both[1] - looked_up
    assert any("int8, one group: embedding/table" in line for line in describe_packed(packed))


@pytest.mark.parametrize(("table", "output"), [("Q4_1", None), ("Q5_0", "Q8_0"), ("Q8_0", "F16")])
def test_a_gguf_keeps_them_packed(table, output, tmp_path: Path):
    """Logits of the packed file are those of the widened one, on a mesh too, whatever the formats are."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
        "tie_word_embeddings": output is None, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "max_position_embeddings": 64,
        "hidden_act": "silu",
    }  # fmt: skip
    gguf_writer.save(config, tmp_path / "hf")
    kinds = {"token_embd.weight": Ggml[table]} | ({} if output is None else {"output.weight": Ggml[output]})
    source = open_source(gguf_writer.write(tmp_path / "hf", tmp_path / "m.gguf", Ggml.Q4_0, kinds=kinds))
    plain, packed = source.load(), source.load(weights="packed")
    assert is_packed(packed.params["embedding"]["table"])
    assert output is None or is_packed(packed.params["head"]["weight"]) == (output != "F16")
    split = source.load(weights="packed", mesh=MeshSpec.parse("fsdp=2,tensor=2").build(jax.devices()[:4]))
    want = quick.logits(plain.config, plain.params, TOKENS)
    for one in (packed, split):
        got = quick.logits(plain.config, one.params, TOKENS)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_auto_is_packed_for_a_gguf_where_the_kernel_is(tmp_path: Path, monkeypatch):
    """``--weights auto``; the widened and the packed file have the same logits by the test above."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 32,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    gguf_writer.save(config, tmp_path / "hf")
    coded, plain = (
        gguf_writer.write(tmp_path / "hf", tmp_path / f"{kind.name}.gguf", kind) for kind in (Ggml.Q4_0, Ggml.F16)
    )
    monkeypatch.setattr(load, "may_be_default", lambda *_: True)
    assert [load._packed_is_fast(path) for path in (coded, plain, tmp_path / "hf")] == [True, False, False]
    monkeypatch.setattr(load, "may_be_default", lambda *_: False)
    assert not load._packed_is_fast(coded)
    monkeypatch.undo()
    assert load._packed_is_fast(coded) != bool(native.not_by_default())


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", [name for name in CODE_KINDS if name.endswith("K")])
def test_rows_of_k_quants(name, rng):
    """Codes and blocks of a file as rows: their values, and logits, are GGML's."""
    tensor, want = gguf_tensor(name, rng, 9, 512)
    stored = tensor.stored
    assert stored is not None
    values = pack_rows(stored.codes(slice(None)), stored.form(-1, 1).grid.bits)
    scales = np.stack(stored.params(slice(None)), axis=1)
    np.testing.assert_array_equal(np.stack(stored.params(slice(2, 5)), axis=1), scales[2:5])
    packed = PackedWeight(jnp.asarray(values), jnp.asarray(scales), stored.form(-1, 1))
    most, x = np.abs(want).max(), rng.normal(size=(1, 2, 512)).astype(np.float32)
    rows = packed.lookup(jnp.asarray([[8, 0, 3]]), jnp.float32, (None, None, None))
    np.testing.assert_allclose(rows, want[None, [8, 0, 3]], rtol=0, atol=2e-6 * most)
    got = packed.logits(jnp.asarray(x), (None, None, None))
    np.testing.assert_allclose(got, x @ want.T, rtol=0, atol=2e-6 * (np.abs(x) @ np.abs(want).T).max())


def test_an_adapter_that_has_the_whole_embedding_replaces_it(rng):
    """`modules_to_save`: the dense matrix takes the place of the packed one, which is the head too."""
    config = tiny.decoder(embed_dim=64, head_dim=16, layers=1, tied=True, dtype="float32")
    model = functional(config)
    packed = pack_params(model, jax.tree.map(jnp.asarray, quick.params(config)), "int8")
    table = rng.normal(size=(config.vocab_size, 64)).astype(np.float32)
    adapter = Adapter(kind="lora", factors={}, ranks={}, modules={"embedding/table": table})
    params = adapted_params(model, packed, adapter)
    np.testing.assert_array_equal(params["embedding"]["table"], table)
    other = dataclasses.replace(adapter, modules={"embedding/table": -table})
    got, negated = (quick.logits(config, p, TOKENS) for p in (params, adapted_params(model, packed, other)))
    assert np.abs(got - negated).max() > 0.1
