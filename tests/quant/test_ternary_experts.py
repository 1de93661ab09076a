"""Ternary experts in a dictionary code (QMoE): exact, below a bit a weight where most are zeros, served as they are."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.convert.quantise import QuantiseConfig, quantise
from jaxllm.convert.source_layers import SourceLayers
from jaxllm.hub import HubError, load_hf, open_source
from jaxllm.infer import EngineConfig
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.streaming.layer_store import LoadedLayers, WithoutExperts, units_of
from jaxllm.infer.streaming.offload_budget import OffloadBudget
from jaxllm.infer.streaming.open_streamed import open_streamed
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import StreamedWeights, WeightPlacement
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MoeConfig, RouterConfig, functional
from jaxllm.models.packed_weight import PackedWeight
from jaxllm.quant import pack_params, packed_shapes
from jaxllm.quant.formats import ternary_dictionary
from jaxllm.quant.formats.format_names import parse_format
from jaxllm.quant.formats.ternary_dictionary import TernaryDictionary
from jaxllm.quant.packing import packed_weight
from jaxllm.quant.ternary_code import WORDS, ZEROS, decode, decode_row, dictionary, encode
from pallas_kernels._compat import interpreting
from pallas_kernels.ternary_matmul import ternary_matmul
from pallas_kernels.ternary_matmul.codewords import LONGEST
from tests import environment, quick
from tests.infer import engines
from tests.quant.test_expert_formats import by_path, mixture, without_tokenizer  # noqa: F401
from tests.quant.test_quantise import IDS, LENGTH, ROWS, logits


def sparse(rng: np.random.Generator, rows: int, inputs: int, zeros: float) -> np.ndarray:
    other = (1 - zeros) / 2
    return rng.choice([-1, 0, 1], size=(rows, inputs), p=[other, zeros, other]).astype(np.int8)


def test_the_dictionary_has_the_likeliest_runs():
    """By the runs' own values: no run that is left out is likelier than one that is there."""
    runs, lengths, children = dictionary()
    nonzeros = np.zeros(WORDS, int)
    for place in range(LONGEST):
        pair = runs[place // 7] >> 4 * (place % 7) & 15
        nonzeros += np.where(place < lengths, (pair % 3 != 1).astype(int) + (pair // 3 != 1), 0)
    chance = (2 * lengths - nonzeros) * np.log(ZEROS) + nonzeros * np.log((1 - ZEROS) / 2)
    assert lengths.max() == LONGEST
    assert (np.diff(chance) < 1e-9).all()
    assert len(np.unique(np.concatenate([runs, lengths[None].astype(np.uint32)]), axis=1).T) == WORDS
    cut = chance[(children[:-1] < 0).any(axis=1) & (lengths < LONGEST)]  # some longer run is no codeword
    assert (cut + 2 * np.log((1 - ZEROS) / 2)).max() < chance[-1] + 1e-9
    whole = children[:-1][(lengths < LONGEST) & (chance + 2 * np.log(ZEROS) > chance[-1] + 1e-9)]
    assert (whole[:, 4] >= 0).all()  # with two more zeros it is likelier than the last codeword
    assert (children[-1] >= 0).all()


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("rows", "inputs"), [(7, 64), (3, 31), (1, 1), (5, 200)])
@pytest.mark.parametrize("zeros", [0.4, 0.885, 1.0])
def test_rows_are_decoded_exactly(rows, inputs, zeros, rng):
    """All rows in JAX, with codewords of nothing after them, and each row alone from its own codewords."""
    values = sparse(rng, rows, inputs, zeros)
    words, counts = encode(values)
    padded = jnp.asarray(np.concatenate([words, rng.integers(0, WORDS, 5).astype(np.uint16)]))
    np.testing.assert_array_equal(decode(padded, rows, inputs), values)
    for row, end, count in zip(values, np.cumsum(counts), counts, strict=True):
        np.testing.assert_array_equal(decode_row(words[end - count : end], inputs), row)
    with pytest.raises(ValueError, match="values -1, 0 and 1 alone"):
        encode(values + 3)


@pytest.mark.parametrize("zeros", [0.81, 0.83, 0.885, 0.95])
def test_most_zeros_take_less_than_a_bit(zeros, rng):
    """From 82% of zeros on; the dictionary is within 0.27 bits of the entropy of values."""
    values = sparse(rng, 64, 2048, zeros)
    bits = 16 * len(encode(values)[0]) / values.size
    entropy = -zeros * np.log2(zeros) - (1 - zeros) * np.log2((1 - zeros) / 2)
    assert entropy < bits < entropy + 0.27
    assert (bits < 1) == (zeros > 0.82)


def ternary(weight: np.ndarray) -> np.ndarray:
    """-1, 0 or 1 times the largest magnitude of each column, whichever is nearest."""
    most = np.abs(weight).max(axis=-2, keepdims=True)
    return np.where(np.abs(weight) > most / 2, np.sign(weight) * most, 0)


def test_matmuls_are_those_of_the_ternary_matrices(rng):
    """Of one row an expert and of many, at less than a bit a weight in all; what is ternary already stays."""
    weight = rng.normal(size=(3, 1024, 64)).astype(np.float32)
    packed = packed_weight(TernaryDictionary(), jnp.asarray(weight))
    want = ternary(weight)
    np.testing.assert_array_equal(packed.dense(jnp.float32), want)
    assert packed.shape == weight.shape
    assert 0.7 < 8 * packed.nbytes / weight.size < 1
    assert np.mean(want == 0) > 0.85
    again = packed_weight(TernaryDictionary(), packed.dense(jnp.float32))
    jax.tree.map(np.testing.assert_array_equal, again, packed)
    for sizes in ([1, 0, 1], [9, 2, 0]):
        rows = rng.normal(size=(sum(sizes), 1024)).astype(np.float32)
        got = jax.jit(packed.grouped_matmul)(jnp.asarray(rows), jnp.asarray(sizes, jnp.int32))
        matrices = np.repeat(want, sizes, axis=0).astype(np.float64)
        np.testing.assert_allclose(got, np.einsum("mi,mio->mo", rows, matrices), rtol=0, atol=1e-3)


@pytest.mark.parametrize("rows", [2, 300])
def test_one_expert_at_a_time_is_decoded(rows):
    """What decode and prefill need beside their arguments does not grow with the number of experts, and is less than
    two decoded matrices with the positions of their values.
    """
    inputs, outputs = 256, 512

    def temporaries(experts: int) -> int:
        form = TernaryDictionary(inputs, outputs)
        weight = PackedWeight(
            jax.ShapeDtypeStruct((experts, 5000, 1), np.uint16),
            jax.ShapeDtypeStruct((experts, 1, outputs), np.float32),
            form,
        )
        hidden, sizes = jax.ShapeDtypeStruct((rows, inputs), np.float32), jax.ShapeDtypeStruct((experts,), np.int32)
        run = jax.jit(lambda weight, hidden, sizes: weight.grouped_matmul(hidden, sizes))
        found = run.lower(weight, hidden, sizes).compile(environment.AS_EVER).memory_analysis()
        assert found is not None
        return found.temp_size_in_bytes

    few, many, matrix = temporaries(4), temporaries(32), inputs * outputs * 4
    assert matrix <= few < 2.5 * matrix + 1.6 * rows * (inputs + outputs) * 4
    assert many - few < 0.05 * matrix


@pytest.mark.drawn(2)
@pytest.mark.parametrize("tokens", [1, 16])
def test_programs_of_slots_decode_one_expert_at_a_time(tokens, rng):
    """The temporaries of an engine's programs for experts in slots are the same with six slots as with two."""
    config = DecoderConfig(
        64, 64, 1, pattern=(BlockConfig(AttentionConfig(2, 2, 32), MoeConfig(6, 2, 256, router=RouterConfig())),)
    )
    model = functional(config)
    params = pack_params(model, jax.tree.map(jnp.asarray, quick.params(config)), "experts_ternary")
    ends = {name: value for name, value in params.items() if name != "segments"}
    sizes = EngineConfig(
        max_sequences=1, max_batched_tokens=tokens, max_len=16, page_size=8, pages=4, buckets=(tokens,),
        samplers=("plain",), layer_window=1,
    )  # fmt: skip

    def temporaries(slots: int) -> int:
        weights = StreamedWeights.of(model, ends, LoadedLayers(params), WeightPlacement(1, 9, expert_slots=slots))
        engine = Engine.of(model, weights, sizes, strict=True)
        found = [
            program.memory.temp_size_in_bytes
            for name, program in dict(engine.runner.programs).items()
            if name.endswith(("-first", "-more"))
        ]
        engine.runner.close()
        assert len(found) >= 2
        return max(found)

    few, many, matrix = temporaries(2), temporaries(6), 64 * 256 * 4
    assert matrix <= few < 5 * matrix
    assert many - few < 0.05 * matrix


def test_few_rows_on_gpus_are_multiplied_where_they_are_decoded(rng, monkeypatch):
    """No more rows than experts: by the kernel, here interpreted; with more, expert after expert."""
    weight = ternary(rng.normal(size=(5, 70, 33)).astype(np.float32))
    packed = packed_weight(TernaryDictionary(), jnp.asarray(weight))
    asked: list[int] = []

    def kernel(rows: Any, *more: Any, **options: Any) -> Any:
        with interpreting():
            found = ternary_matmul(rows, *more, **options)
        asked.append(rows.shape[0])
        return found

    monkeypatch.setattr(ternary_dictionary, "ternary_matmul", kernel)
    assert packed.format.multiply_rows(jnp.ones((1, 70)), jnp.zeros(1, int), packed.values, packed.scales) is None
    monkeypatch.setattr(ternary_dictionary, "may_be_default", lambda operation, name: name == "pallas_gpu")
    for sizes in ([0, 2, 0, 1, 1], [1, 0, 0, 0, 1], [3, 0, 4, 0, 0]):
        rows = rng.normal(size=(sum(sizes) + (sum(sizes) == 2), 70)).astype(np.float32)
        got = packed.grouped_matmul(jnp.asarray(rows), jnp.asarray(sizes, jnp.int32))
        matrices = np.repeat(weight, sizes, axis=0).astype(np.float64)
        np.testing.assert_allclose(got[: sum(sizes)], np.einsum("mi,mio->mo", rows[: sum(sizes)], matrices), atol=1e-4)
        assert not np.asarray(got)[sum(sizes) :].any()
    assert asked == [4, 3]
    got = packed.grouped_matmul(jnp.ones((1, 70), jnp.float16), jnp.asarray([0, 0, 0, 0, 1], jnp.int32))
    np.testing.assert_allclose(got[0], weight[4].sum(axis=0), rtol=1e-2, atol=0.1)
    assert asked == [4, 3], "numbers that the kernel does not take are multiplied expert after expert"


@pytest.mark.drawn(2)
def test_files_are_served_as_they_are(mixture, tmp_path):  # noqa: F811
    """``jaxllm quantise --only experts --format ternary``, then ``--weights experts_ternary``: the same logits."""
    name = parse_format("ternary")
    config = QuantiseConfig("gptq", name.bits, name.group, name.symmetric, ROWS, LENGTH, name.codebook, only="experts")
    report = quantise(open_source(mixture), tmp_path / "out", config, IDS)
    assert sum(one.error for one in report.matrices) < 0.95 * sum(one.nearest for one in report.matrices)
    plain = load_hf(tmp_path / "out")
    for path, leaf in by_path(plain.params).items():
        if "/experts/" in path:
            np.testing.assert_array_equal(leaf, ternary(np.asarray(leaf)))
    packed = dataclasses.replace(plain, params=pack_params(functional(plain.config), plain.params, "experts_ternary"))
    np.testing.assert_allclose(logits(packed), logits(plain), rtol=0, atol=1e-5)
    with pytest.raises(HubError, match="have another size in each layer, and go with experts in slots alone"):
        open_streamed(tmp_path / "out", OffloadBudget.parse("window=1"), weights="experts_ternary")
    with pytest.raises(ValueError, match="'experts_ternary': its sizes depend on the weights"):
        packed_shapes(functional(plain.config), "experts_ternary")
    with pytest.raises(HubError, match="give bits 2, group 0"):
        QuantiseConfig("rtn", 2, 16, codebook="ternary")


@pytest.mark.drawn(3)
def test_layers_read_one_by_one_have_one_size(mixture):  # noqa: F811
    """What ``--offload experts=N`` holds on the host: codes padded to the longest, of the ternary matrices."""
    layers = SourceLayers(mixture, weights="experts_ternary")
    placed = WithoutExperts(layers, units_of(layers.model.config.segments)).experts()
    whole = by_path(load_hf(mixture).params)
    for (unit, block), own in placed.items():
        assert own.whole == next(iter(placed.values())).whole
        for number, expert in enumerate(own.each):
            for name, weight in expert.items():
                matrix = whole[f"segments/{unit.segment}/{block}/mlp/experts/{name}"][unit.repeat, number]
                dense = jax.tree.map(jnp.asarray, weight).dense(jnp.float32)
                np.testing.assert_array_equal(dense[0], ternary(np.asarray(matrix)))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("slots", [1, 3])
def test_slots_hold_the_code(slots, rng):
    """Tokens are those of resident dense experts; codewords and scales are what is copied."""
    model = functional(engines.model_of("mixtral", "float32"))
    params = pack_params(model, engines.params_of("mixtral", "float32"), "experts_ternary")
    dense: Any = jax.tree.map(
        lambda x: x.dense(jnp.float32) if isinstance(x, PackedWeight) else x,
        params,
        is_leaf=lambda x: isinstance(x, PackedWeight),
    )
    config = engines.ENGINES["roomy"]
    engine = engines.build(config, "mixtral", params=params, placement=WeightPlacement(1, 9, expert_slots=slots))
    made = engines.serve(engine, engines.traffic(rng, config, 3))
    assert engines.error("mixtral", "float32", made, dense) <= 1e-3
    assert isinstance(engine.runner, StreamedRunner)
    stage = engine.runner.experts
    assert stage is not None
    experts = params["segments"]["0"]["0"]["mlp"]["experts"]
    size = sum(x.nbytes for x in jax.tree.leaves(jax.tree.map(lambda x: x[0, 0], experts)))
    assert stage.counts.load_bytes == size * stage.counts.loads > 0
    assert engine.runner.program_cache is not None
    assert engine.runner.program_cache.counts.late == 0
