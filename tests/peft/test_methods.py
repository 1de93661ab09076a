"""Methods of adaptation against their definitions, in float64: the merged dense weight, forward and backward."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.data import DataConfig
from jaxllm.models import functional
from jaxllm.models.attention_context import AttentionParams
from jaxllm.models.linear import dense
from jaxllm.models.param_subset import merge, select
from jaxllm.peft.adapted_model import adapted_model, base_params, merge_adapters, start_params
from jaxllm.peft.adapter_method import AdapterConfig
from jaxllm.peft.method_table import ADAPTER_METHODS
from jaxllm.peft.methods.longlora import ShiftedGroups
from jaxllm.peft.methods.lora_ga import leading_singular_vectors
from jaxllm.train import RunConfig
from jaxllm.train.run_model import run_model, trained_params
from jaxllm.train.step.step_builder import build_optimizer
from sharding import MeshSpec
from tests import quick, tiny

pytestmark = pytest.mark.usefixtures("float64")

MODEL = tiny.decoder(heads=2, kv_heads=1, head_dim=64, embed_dim=64, mlp=64, layers=2)
KINDS = sorted(kind for kind, method in ADAPTER_METHODS.items() if method.architecture is None)
"""Those that adapt weights; ``test_virtual_tokens.py`` and ``test_expert_adapters.py`` have the others."""
TOKENS = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6]])


def loss(model: Any, params: Any) -> Any:
    positions = jnp.arange(TOKENS.shape[1])[None]
    hidden, _ = model.forward(params, TOKENS, positions, model.training_context(jnp.ones_like(TOKENS)))
    return jnp.mean(jnp.sin(3.0 * hidden))


def start(kind: str) -> tuple[RunConfig, Any, Any, Any]:
    """(run, adapted model, base, parameters before training)."""
    run = RunConfig(model=MODEL, adapter=AdapterConfig(kind, 3, 5.0), data=DataConfig(batch_size=2, seq_len=8))  # type: ignore
    base = functional(MODEL).init(jax.random.key(0))
    model = run_model(run)
    mesh = MeshSpec.parse("dp").build(jax.devices()[:1])
    grads = jax.jit(jax.grad(functools.partial(loss, functional(MODEL))))(base) if kind == "lora_ga" else None
    return run, model, base, start_params(model, run.adapter, base, mesh, 1, grads)


def moved(run: RunConfig, model: Any, params: Any) -> Any:
    """Parameters whose adapters have been trained for a while."""
    mask = trained_params(run, model)
    keys = iter(jax.random.split(jax.random.key(2), 99))
    return jax.tree.map(
        lambda on, x: x + 0.1 * jax.random.normal(next(keys), x.shape, x.dtype) if on else x, mask, params
    )


def definition(kind: str, weight: Any, contract: int) -> Any:
    """The dense weight of one layer by the method's formula; gradients pass to the adapter alone."""
    base = jax.lax.stop_gradient(dense(weight.base, jnp.dtype("float64")))
    scale = 5.0 / (np.sqrt(3) if kind in ("rslora", "lora_ga") else 3)
    letters = {1: "ar,rb->ab", 2: "acr,rb->acb"}[contract] if base.ndim - contract == 1 else "ar,rbc->abc"
    merged = base + scale * jnp.einsum(letters, weight.low_rank.a, weight.low_rank.b)
    if kind == "lora_ga":
        merged -= scale * jax.lax.stop_gradient(jnp.einsum(letters, weight.initial.a, weight.initial.b))
    if kind != "dora":
        return merged
    norms = jnp.sqrt(jnp.sum(merged**2, axis=tuple(range(contract))))
    return weight.magnitude * merged / jax.lax.stop_gradient(norms)


@pytest.mark.drawn(0.25)
@pytest.mark.parametrize("kind", KINDS)
def test_a_method_is_its_definition(kind: str) -> None:
    assert error_of_definition(kind) < 1e-10


def error_of_definition(kind: str) -> float:
    """It starts as its base; later, the loss and the gradients of the adapter are those of the dense merged weight.

    Returns:
        the largest relative difference of the loss and of a parameter's gradients.
    """
    run, model, base, params = start(kind)
    plain = dataclasses.replace(functional(MODEL), training_context=model.training_context)
    linears = model.linears()
    for one, other in zip(jax.tree.leaves(base_params(params)), jax.tree.leaves(base), strict=kind != "qlora"):
        if kind != "qlora":
            np.testing.assert_array_equal(one, other)
    dequantised = merge_adapters(model, params)
    params = moved(run, model, params)
    mask = trained_params(run, model)

    def by_method(trained: Any) -> Any:
        return loss(model, merge(trained, params))

    def by_definition(trained: Any) -> Any:
        def one(path: Any, node: Any) -> Any:
            if not hasattr(node, "low_rank"):
                return node
            linear = linears[jax.tree_util.keystr(path, simple=True, separator="/")]
            return jax.vmap(functools.partial(definition, kind, contract=linear.contract))(node)

        whole = merge(trained, params)
        return loss(plain, jax.tree.map_with_path(one, whole, is_leaf=lambda x: hasattr(x, "low_rank")))

    trained = select(mask, params)
    got, want = (quick.jit(jax.value_and_grad(fn))(trained) for fn in (by_method, by_definition))
    assert float(quick.jit(functools.partial(loss, plain))(merge_adapters(model, params))) == pytest.approx(
        float(want[0]), abs=1e-10
    )
    before = float(quick.jit(functools.partial(loss, plain))(dequantised))
    assert abs(before - float(want[0])) > 1e-6
    if kind != "qlora":
        assert float(quick.jit(functools.partial(loss, plain))(base)) == pytest.approx(before, abs=1e-12)
    return tiny.leaf_error(jax.device_get(got), jax.device_get(want))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_state_is_that_of_the_adapter(kind: str) -> None:
    """AdamW has two moments for each trained number, and none for the base."""
    run, model, _, params = start(kind)
    mask = trained_params(run, model)
    state = jax.eval_shape(build_optimizer(run, model).init, params)
    sizes = [leaf.size for leaf in jax.tree.leaves(state) if leaf.size > 1]
    adapters = [leaf.size for leaf in jax.tree.leaves(select(mask, params))]
    assert sorted(sizes) == sorted(2 * adapters)
    assert sum(adapters) < 0.4 * sum(leaf.size for leaf in jax.tree.leaves(functional(MODEL).abstract()))


def test_a_packed_base_is_not_saved_dense() -> None:
    """Residuals of the backward pass have no dequantised weight of a layer."""
    run, model, _, params = start("qlora")
    trained = select(trained_params(run, model), params)
    _, pull = jax.vjp(lambda t: loss(model, merge(t, params)), trained)
    shapes = {leaf.shape[1:] for leaf in jax.tree.leaves(pull) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    assert not shapes & {linear.shape for linear in model.linears().values()}


@pytest.mark.drawn(0.25)
@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_layers_with_different_remat_have_the_gradients_of_one_loop(kind: str) -> None:
    """The frozen base, packed or not, and the adapters are leaves of the stack that several loops read."""
    run, model, _, params = start(kind)
    params = moved(run, model, params)
    trained = select(trained_params(run, model), params)

    def found(remat: str) -> Any:
        one = dataclasses.replace(model, config=dataclasses.replace(model.config, remat=remat))
        return jax.device_get(quick.jit(jax.value_and_grad(lambda t: loss(one, merge(t, params))))(trained))

    assert tiny.leaf_error(found("none=1,full=1"), found("none")) < 1e-12


def test_targets_choose_matmuls() -> None:
    model = functional(MODEL)
    config = AdapterConfig("lora", targets=("segments/*/q,down",))
    leaves = jax.tree_util.tree_leaves_with_path(adapted_model(model, config).abstract())
    names = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves}
    assert {name.split("/")[4] for name in names if name.endswith("/low_rank/a")} == {"q", "down"}


@pytest.mark.drawn(0.2)
def test_lora_ga_steps_along_the_gradient() -> None:
    """The first effective update has a larger cosine with the full gradient than LoRA's of the same rank."""

    def cosine(kind: str) -> float:
        run, model, base, params = start(kind)
        grads = jax.grad(functools.partial(loss, functional(MODEL)))(base)
        mask = trained_params(run, model)
        step = jax.grad(lambda trained: loss(model, merge(trained, params)))(select(mask, params))
        rate = 1e-4
        after = jax.tree.map(lambda on, p, g: p - rate * g if on else p, mask, params, merge(step, params))
        moves = jax.tree.map(jnp.subtract, merge_adapters(model, params), merge_adapters(model, after))
        pairs = [
            (m, grads_of(path, grads)) for path, m in jax.tree_util.tree_leaves_with_path(moves) if jnp.any(m != 0)
        ]
        dot = sum(jnp.vdot(m, g) for m, g in pairs)
        return float(dot / jnp.sqrt(sum(jnp.vdot(m, m) for m, _ in pairs) * sum(jnp.vdot(g, g) for _, g in pairs)))

    def grads_of(path: Any, grads: Any) -> Any:
        return functools.reduce(lambda node, key: node[key.key], path, grads)

    assert cosine("lora_ga") > cosine("lora") + 0.1


def test_leading_singular_vectors() -> None:
    """Those of numpy up to their signs, of matrices whose singular values fall like a gradient's."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(2, n, 40)))[0] for n in (90, 60))
    values = 2.0 ** -np.arange(40)
    u, vt = leading_singular_vectors(jnp.asarray((left * values) @ right.mT), 12)
    assert u.shape == (2, 90, 12)
    assert vt.shape == (2, 12, 60)
    for found, true in ((u, left), (vt.mT, right)):
        overlap = np.abs(np.einsum("lmq,lmq->lq", found[..., :6], true[..., :6]))
        np.testing.assert_allclose(overlap, 1, rtol=0, atol=1e-12)
    whole, _ = leading_singular_vectors(jnp.asarray((left * values) @ right.mT), 99)
    assert whole.shape == (2, 90, 60)


@pytest.mark.parametrize(("group", "n", "k"), [(2, 4, 2), (4, 4, 2), (8, 4, 2), (16, 4, 2), (4, 9, 3), (8, 3, 3)])
def test_shifted_groups_are_a_mask(group: int, n: int, k: int) -> None:
    """Attention with grouped and shifted heads, less that of dense scores with the mask written out; also its FLOPs."""
    rng = np.random.default_rng(3)
    b, s, h = 2, 16, 8
    q, key, v = (jnp.asarray(rng.normal(size=(b, s, heads, h))) for heads in (n, k, k))
    segments = jnp.asarray([[1] * 5 + [2] * 11, [1] * 16])
    params, places = AttentionParams(0.3), jnp.zeros((b, s), int)
    context = ShiftedGroups(segments, "contiguous", group)
    attend = jax.jit(lambda q, key, v: context.attend(jnp.int32(0), q, key, v, places, params)[0])
    i, j = np.arange(s)[:, None], np.arange(s)
    for head in range(n):
        ids = (np.arange(s) + (head % 2) * group // 2) // group
        seen = (j <= i) & (ids[:, None] == ids)
        mask = seen & (np.asarray(segments)[:, :, None] == np.asarray(segments)[:, None])
        scores = np.where(mask, 0.3 * np.einsum("bih,bjh->bij", q[:, :, head], key[:, :, head * k // n]), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        want = (weights / weights.sum(-1, keepdims=True)) @ np.asarray(v[:, :, head * k // n])
        np.testing.assert_allclose(attend(q, key, v)[:, :, head], want, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"legal adapter\.group"):
        ShiftedGroups(None, "contiguous", 3).attend(jnp.int32(0), q, key, v, places, params)


def test_heads_that_alternate_otherwise_on_each_device_are_refused() -> None:
    """Heads 0 to 5 over two devices would have 1 and 4 shifted, where one device has 1, 3 and 5."""
    mesh = MeshSpec.parse("tensor=2").build(jax.devices()[:2])
    q, params, places = jnp.ones((1, 8, 6, 4)), AttentionParams(0.3), jnp.zeros((1, 8), int)
    for heads, legal in ((q, False), (q[:, :, :4], True)):
        attend = lambda x: ShiftedGroups(None, "contiguous", 4).attend(jnp.int32(0), x, x, x, places, params)[0]  # noqa: E731
        with jax.set_mesh(mesh), contextlib.nullcontext() if legal else pytest.raises(ValueError, match="3 of 6 heads"):
            jax.jit(attend)(heads)
    with pytest.raises(ValueError, match="1 of 1 heads"):
        attend(q[:, :, :1])


def test_flops_of_shifted_groups_fall_with_the_group() -> None:
    """Those of the scores and values in the compiled program: in proportion to the size of a group."""

    def flops(group: int) -> float:
        context = ShiftedGroups(None, "contiguous", group)
        shape, places = jax.ShapeDtypeStruct((1, 2048, 2, 16), jnp.float32), jnp.zeros((1, 2048), int)
        run = jax.jit(lambda q, k, v: context.attend(jnp.int32(0), q, k, v, places, AttentionParams(0.3))[0])
        return run.lower(shape, shape, shape).compile().cost_analysis()["flops"]  # type: ignore[index]

    whole, quarter = flops(2048), flops(512)
    assert 0.2 < quarter / whole < 0.4


def test_longlora_trains_norms_and_the_embedding_too() -> None:
    run, model, _, params = start("longlora")
    paths = jax.tree_util.tree_leaves_with_path(select(trained_params(run, model), params))
    names = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths}
    others = {name for name in names if "low_rank" not in name}
    assert others == {
        "embedding/table", "head/norm/gain", "segments/0/0/attention_norm/gain", "segments/0/0/mlp_norm/gain"
    }  # fmt: skip
