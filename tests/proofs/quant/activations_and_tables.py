"""Lookup tables with learned scales, activations in int8, and bits by layer: definitions, and what they gain."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.convert.load import load_model
from jaxllm.models import functional
from jaxllm.models.attention_context import Segments
from jaxllm.models.packed_weight import PackedWeight
from jaxllm.quant.bit_allocation import allocate_bits, total_error
from jaxllm.quant.codebooks import CodebookGrid
from jaxllm.quant.formats.int8_activations import Int8Activations
from jaxllm.quant.formats.outlier_columns import OutlierColumns
from jaxllm.quant.grids import IntGrid
from jaxllm.quant.lookup_tables import TABLES, LearnedScaleGrid
from jaxllm.quant.methods.learned_scales import DAMPING, learned_scales
from jaxllm.quant.methods.nearest import round_to_nearest, spread
from jaxllm.quant.packing import pack_params
from sharding import MeshSpec, abstract_params, shardings_of
from tests import tiny
from tests.proofs.harness import proof
from tests.quant.packed_programs import compile_cell
from tests.quant.test_bit_allocation import drawn_layers, least_error
from tests.quant.test_gptq import drawn
from tests.quant.test_int8_activations import integer_reference


@proof("quant", count=60, sample=1, bound={"fitted": 1.0, "worst_column": 1.0, "solved": 1.0}, float64=True)
def learned_scales_beat_normal_float(seed: int) -> dict[str, float]:
    """Squared errors over those of NF4 or NF3, whose scale is the largest magnitude: of weights that are fitted, of the
    column that gains least, and of the results of scales that are solved for. Weights are normal, heavy-tailed or both.
    """
    rng = np.random.default_rng(seed)
    table, size = str(rng.choice(list(TABLES.values()))), int(rng.choice([8, 16, 32, 64]))
    inputs = size * int(rng.integers(1, 4))
    weight, x = drawn(rng, inputs, 12)
    weight *= rng.choice([1.0, 1.0, 4.0], weight.shape) if rng.integers(2) else 1
    gram = x.T @ x + np.eye(inputs) * DAMPING * np.mean(np.square(x).sum(0))
    found = []
    for grid in (CodebookGrid(table), LearnedScaleGrid(table)):
        codes, params = round_to_nearest(jnp.asarray(weight), grid, size)
        found.append(np.square(weight - grid.decode(codes, spread(params, size, inputs))).sum(0))
    grid = CodebookGrid(table)
    codes, params = learned_scales(jnp.asarray(weight), jnp.asarray(x.T @ x), grid, size)
    plain, own = round_to_nearest(jnp.asarray(weight), grid, size)
    offs = [np.asarray(weight - grid.decode(c, spread(p, size, inputs))) for c, p in ((codes, params), (plain, own))]
    solved, before = ((off * (gram @ off)).sum(0) for off in offs)
    return {
        "fitted": float(found[1].sum() / found[0].sum()),
        "worst_column": float((found[1] / found[0]).max()),
        "solved": float((solved / before).max()),
    }


@functools.cache
def matrices_of_smollm2() -> list[np.ndarray]:
    """Matrices [I, O] of three of SmolLM2's blocks."""
    loaded = load_model("smollm2")
    found = []
    for name, leaf in jax.tree_util.tree_leaves_with_path(loaded.model.contracted()):
        if leaf:
            value = functools.reduce(lambda tree, key: tree[key.key], name, loaded.params)
            for row in (0, 14, 29):
                one = np.asarray(value[row], np.float32)
                found.append(one.reshape(int(np.prod(one.shape[:leaf])), -1))
    return found


@proof("quant", cases=["lut4", "lut3"], sample=1, bound={"all": 0.95, "worst_matrix": 1.0})
def learned_scales_of_smollm2(name: str) -> dict[str, float]:
    """Squared errors of SmolLM2's weights over those of NF4 or NF3, groups of 64."""
    sums = []
    for matrix in matrices_of_smollm2():
        own = []
        for grid in (LearnedScaleGrid(TABLES[name]), CodebookGrid(TABLES[name])):
            codes, params = round_to_nearest(jnp.asarray(matrix), grid, 64)
            own.append(float(jnp.sum(jnp.square(matrix - grid.decode(codes, spread(params, 64, len(matrix)))))))
        sums.append(own)
    learned, plain = np.asarray(sums).T
    return {"all": float(learned.sum() / plain.sum()), "worst_matrix": float((learned / plain).max())}


@proof("quant", count=100, sample=2, bound={"product": 1e-13, "rounded": 1e-12}, float64=True)
def products_of_rounded_activations_are_integers(seed: int) -> dict[str, float]:
    """Products over sums of integers in numpy, relative to the largest; and rounded activations times the weight."""
    rng = np.random.default_rng(seed)
    bits, heads, width = int(rng.choice([4, 8])), int(rng.integers(1, 5)), 2 * int(rng.integers(1, 30))
    group = None if rng.random() < 0.3 else 2 * int(rng.integers(1, heads * width))
    outputs, tokens = int(rng.integers(1, 40)), int(rng.integers(1, 9))
    form = Int8Activations(IntGrid(bits), group, -2, 2)
    packed = PackedWeight(*jax.jit(form.pack)(jnp.asarray(rng.normal(size=(heads, width, outputs)))), form)
    codes = np.asarray(form.unpack_codes(packed.values)).reshape(-1, outputs).astype(np.int64) - 2 ** (bits - 1)
    x = rng.standard_t(3, size=(1, tokens, heads * width)) * 10.0 ** rng.integers(-4, 4, (1, tokens, 1))
    multiply = jax.jit(lambda x: packed.project(x, (None, None, None), 2))
    got = multiply(jnp.asarray(x.reshape(1, tokens, heads, width)))
    want = integer_reference(x, codes, np.asarray(packed.scales, np.float64)[0], group or heads * width)
    rounded = np.asarray(form.round_activations(jnp.asarray(x))) @ np.asarray(packed.dense(jnp.float64)).reshape(
        -1, outputs
    )
    most = max(float(np.abs(want).max()), 1e-300)
    return {"product": float(np.abs(got - want).max()) / most, "rounded": float(np.abs(rounded - want).max()) / most}


@proof("quant", count=100, sample=2, bound={"definition": 1e-13, "of_plain_int8": 0.5}, float64=True)
def outlier_columns_are_their_definition(seed: int) -> dict[str, float]:
    """The decomposition over numpy's, relative to the largest; its error over that of plain int8, with outliers."""
    rng = np.random.default_rng(seed)
    inputs, outputs, tokens = int(rng.integers(8, 200)), int(rng.integers(16, 60)), int(rng.integers(2, 20))
    form = OutlierColumns(IntGrid(8), None, -2, 1)
    packed = PackedWeight(*jax.jit(form.pack)(jnp.asarray(rng.normal(size=(inputs, outputs)))), form)
    codes = np.asarray(form.unpack_codes(packed.values)).astype(np.int64) - 128
    scales = np.asarray(packed.scales, np.float64)[0]
    x = np.clip(rng.normal(size=(1, tokens, inputs)), -3, 3)
    places = rng.choice(inputs, int(rng.integers(1, max(2, inputs // 4))), replace=False)
    x[:, :, places] += rng.choice([-1, 1], places.size) * rng.uniform(20, 80, places.size)
    outliers = np.isin(np.arange(inputs), places)
    got = np.asarray(jax.jit(lambda x: packed.project(x, (None, None, None), 1))(jnp.asarray(x)))
    dense = codes * scales
    kept = np.where(outliers, x, 0) @ dense
    want = integer_reference(np.where(outliers, 0, x), codes, scales, inputs) + kept
    plain = integer_reference(x, codes, scales, inputs)
    exact = x @ dense
    return {
        "definition": float(np.abs(got - want).max() / np.abs(want).max()),
        "of_plain_int8": float(np.linalg.norm(got - exact) / np.linalg.norm(plain - exact)),
    }


@proof("quant", count=200, sample=3, bound={"of_least": 1 + 1e-12, "of_uniform": 1.0})
def greedy_bits_are_the_best(seed: int) -> dict[str, float]:
    """The error of greedy bits over that of the best of all choices, for layers of one size; and over that of uniform
    bits, for layers of any.
    """
    rng = np.random.default_rng(seed)
    found = {}
    for name, sizes in (("of_least", (100,)), ("of_uniform", (100, 150, 400))):
        layers = drawn_layers(rng, int(rng.integers(2, 7)), sizes)
        budget = float(rng.choice([2.5, 3, 3.5, 4, 4.7]))
        error = total_error(layers, allocate_bits(layers, budget))
        uniform = max(n for n in layers[0].error if n <= budget)
        least = least_error(layers, budget) if name == "of_least" else total_error(layers, [uniform] * len(layers))
        found[name] = error / least
    return found


MESHES = ["fsdp=4", "tensor=2", "fsdp=2,tensor=2", "data=2,fsdp=2,tensor=2", "data=4,tensor=2"]
FORMATS = ["int4", "int8", "lut4", "lut3", "w8a8", "w4a8", "llm_int8"]
CASES = [f"{name} {mesh}" for name in FORMATS for mesh in MESHES]


@proof("quant", cases=CASES, sample=1, float64=True, bound=1e-9)
def packed_products_on_meshes(case: str) -> float:
    """Logits of a model that is packed by shard, over those of the same packed weights on one device."""
    name, mesh = case.split()
    rng = np.random.default_rng([*case.encode()])
    config = tiny.decoder(embed_dim=256, heads=4, kv_heads=2, head_dim=16, mlp=256, layers=1, norms="pre")
    tokens, model = jnp.asarray(rng.integers(0, config.vocab_size, (8, 8))), functional(config)

    def logits(params, tokens):
        hidden, _ = model.forward(params, tokens, jnp.broadcast_to(jnp.arange(8), tokens.shape), Segments())
        return model.head(params, hidden)

    spec = MeshSpec.parse(mesh)
    built = spec.build(jax.devices()[: int(np.prod([int(part.split("=")[1]) for part in mesh.split(",")]))])
    with jax.set_mesh(built):
        abstract = abstract_params(model.abstract(), model.logical_axes(), built, model.rules)
        params = model.init(jax.random.key(int(rng.integers(1000))), shardings_of(abstract))
        packed = pack_params(model, params, name)
        placed = jax.device_put(tokens, jax.NamedSharding(built, model.rules.spec(("batch", "seq"), built)))
        got = np.asarray(jax.jit(logits)(packed, placed))
    alone = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), packed)
    return float(np.abs(got - jax.jit(logits)(alone, tokens)).max())


PROGRAMS = [
    ("v6e:1x1", "data=1", "int4"), ("v6e:2x2", "tensor=4", "int4"), ("v6e:2x2", "fsdp=2,tensor=2", "lut4"),
    ("v5e:2x2", "fsdp=4", "int8"), ("h100:1x2", "tensor=2", "int8"), ("h100:1x2", "fsdp=2", "lut4"),
]  # fmt: skip
"""(topology, mesh, format)."""


@proof("quant", cases=PROGRAMS, sample=1, bound={"temporaries": 1.0})
def programs_multiply_packed_codes(cell: tuple[str, str, str]) -> dict[str, float]:
    """Temporaries of a forward pass of few tokens, compiled for a device, over the bytes of a layer's dense matrices.

    All seven matmuls of a layer are the kernel.
    """
    found = compile_cell(*cell)
    assert found["kernels"] >= 7
    return {"temporaries": found["temp_bytes"] / found["dense_bytes"]}
