"""Gated attention, one new file and one row: trained, planned, compiled, saved, refused at export, and served."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import from_dict, to_dict
from jaxllm.convert.load import load_model
from jaxllm.hub import HubError
from jaxllm.hub.families.config_json import config_json
from jaxllm.infer import EngineConfig
from jaxllm.models import DecoderConfig
from jaxllm.models.layers.layer_table import ATTENTION_LAYERS
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.layout_search import predict_layout
from jaxllm.train import train
from jaxllm.train.compile_step import compile_here
from jaxllm.train.model_flops import train_flops_per_token
from sharding import MeshSpec
from sharding.topology import Topology
from tests import quick, tiny
from tests.infer import engines
from tests.seams.gated_attention import GatedAttentionConfig
from tests.seams.seam_files import files_that_name
from tests.train import runs
from tests.train.test_plans import loss_and_grads

ATTENTION_LAYERS.append(GatedAttentionConfig)  # the row


def gated(config: DecoderConfig, gate: str = "element") -> DecoderConfig:
    """The decoder with a gate in each attention layer."""
    old = config.pattern[0].attention
    fields = {f.name: getattr(old, f.name) for f in dataclasses.fields(old)}
    attention = GatedAttentionConfig(**fields, gate=gate)  # type: ignore[arg-type]
    return dataclasses.replace(config, pattern=(dataclasses.replace(config.pattern[0], attention=attention),))


def reference_logits(config: DecoderConfig, params: Any, tokens: Any) -> Any:
    """Float64 logits of whole rows by plain jax.numpy: no scan, no sharding, no kernels."""
    attention = config.pattern[0].attention
    n, k, h = attention.heads, attention.kv_heads, attention.head_dim

    def norm(x: Any, gain: Any) -> Any:
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + config.norm_eps) * gain

    def rotated(x: Any) -> Any:
        angles = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-2 * jnp.arange(h // 2) / h)
        cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
        a, b = x[..., : h // 2], x[..., h // 2 :]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = params["embedding"]["table"][tokens]
    block = params["segments"]["0"]["0"]
    for layer in range(config.layers):
        own = jax.tree.map(lambda leaf, i=layer: leaf[i], block)
        a, m = own["attention"], own["mlp"]
        y = norm(x, own["attention_norm"]["gain"])
        q, key, v = (jnp.einsum("bsd,dnh->bsnh", y, a[name]) for name in ("q", "k", "v"))
        key, v = (jnp.repeat(part, n // k, axis=2) for part in (rotated(key), v))
        scores = jnp.einsum("bsnh,btnh->bnst", rotated(q), key) / math.sqrt(h)
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        out = jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), v)
        out = out / (1 + jnp.exp(-jnp.einsum("bsd,dng->bsng", y, a["gate"])))
        x = x + jnp.einsum("bsnh,nhd->bsd", out, a["o"])
        y = norm(x, own["mlp_norm"]["gain"])
        up, gate = y @ m["up"], y @ m["gate"]
        x = x + (gate / (1 + jnp.exp(-gate)) * up) @ m["down"]
    return norm(x, params["head"]["norm"]["gain"]) @ params["embedding"]["table"].T


def trained_error(gate: str, mesh: str, rng: np.random.Generator) -> float:
    """Error of loss and gradients on eight devices against the reference."""
    config = gated(tiny.decoder(layers=2), gate)
    batch = tiny.batch(int(rng.integers(2**16)), 8, 16, 64, packed=False)

    def loss(params: Any) -> Any:
        logits, real = reference_logits(config, params, batch.tokens), batch.targets >= 0
        z = jax.nn.logsumexp(logits, axis=-1)
        own = jnp.take_along_axis(logits, jnp.maximum(batch.targets, 0)[..., None], -1)[..., 0]
        return jnp.sum((z - own + 0.01 * z**2) * real) / jnp.sum(real)  # 0.01: the z-loss of ``loss_and_grads``

    value, wanted = quick.jit(jax.value_and_grad(loss))(jax.tree.map(jnp.asarray, quick.params(config)))
    sums, grads = loss_and_grads(config, batch, mesh, ParallelConfig())
    assert float(jnp.abs(wanted["segments"]["0"]["0"]["attention"]["gate"]).max()) > 1e-6
    return max(abs(float(sums.loss / sums.count) / float(value) - 1), tiny.leaf_error(grads, jax.device_get(wanted)))


def test_trained_on_eight_devices_as_the_reference(rng, float64):
    """One mesh; others: `make proof seams ONLY=gated_attention_is_trained`."""
    assert trained_error("head", "data=2,fsdp=2,tensor=2", rng) < 1e-10


@pytest.mark.drawn(0.3)
def test_planned_and_compiled(tmp_path):
    run = runs.run_config(tmp_path, mesh="fsdp=4,tensor=2")
    plain = dataclasses.replace(
        run, model=dataclasses.replace(tiny.decoder(dtype="float32", kv_heads=4, vocab_size=280), remat="full")
    )
    here = dataclasses.replace(plain, model=gated(plain.model))
    weights = 2 * 16 * 4 * 8  # layers, embed, heads, head_dim
    assert train_flops_per_token(here.model, 16) - train_flops_per_token(plain.model, 16) == 6 * weights
    cluster, mesh = Cluster.parse("v5e:2x4"), MeshSpec.parse("fsdp=4,tensor=2")
    more, less = (predict_layout(r, mesh, cluster).memory for r in (here, plain))
    assert more.parameters - less.parameters >= 4 * weights // 8, "small arrays are padded to tiles"
    small, large = (compile_here(Topology.parse("cpu:8"), to_dict(r)) for r in (plain, here))
    # Parameter and two float32 moments of the gates, split over all eight devices.
    assert large["argument_bytes"] - small["argument_bytes"] == 3 * 4 * weights // 8


@pytest.mark.drawn(0.3)
def test_saved_resumed_loaded_and_refused_at_export(tmp_path):
    run = runs.run_config(tmp_path)
    run = dataclasses.replace(run, model=gated(run.model, "head"))
    assert from_dict(type(run), to_dict(run)) == run
    directory = train(run).directory
    loaded = load_model(directory)
    assert isinstance(loaded.model.config.pattern[0].attention, GatedAttentionConfig)
    assert loaded.params["segments"]["0"]["0"]["attention"]["gate"].shape == (1, 16, 2, 1)
    with pytest.raises(HubError, match="gate: absent there, head here"):
        config_json(loaded.model.config)


def served_error(config: EngineConfig, rng: np.random.Generator) -> float:
    """Error of served log-probabilities against the reference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(engines.MODELS, "gated", gated(engines.MODELS["smollm2"]))
        engine = engines.build(config, "gated", "float64")
        model, weights = engines.model_of("gated", "float64"), engines.params_of("gated", "float64")
    run = quick.jit(lambda tokens: jax.nn.log_softmax(reference_logits(model, weights, tokens)))
    worst = 0.0
    asked = [rng.integers(0, engines.VOCAB, n).tolist() for n in (3, 11, 17)]
    params = engines.SamplingParams(max_tokens=8, temperature=0.0, logprobs=0)
    for prompt, made in zip(
        asked, engines.serve(engine, [{"prompt": p, "params": params} for p in asked]), strict=True
    ):
        (own,) = made.sequences
        text = np.array(own.tokens)
        scores = np.asarray(run(np.pad(text, (0, 32 - len(text)))[None]))[0]
        wanted = scores[np.arange(len(prompt) - 1, len(text) - 1), text[len(prompt) :]]
        worst = max(worst, float(np.abs(wanted - own.logprobs).max()))
    return worst


@pytest.mark.drawn(0.3)
def test_served(rng, float64):
    """One sequence at a time; together: `make proof seams ONLY=gated_attention_is_served`."""
    sizes = dataclasses.replace(engines.ENGINES["tight, swap"], max_sequences=1, decode_steps=1)
    assert served_error(sizes, rng) <= 1e-10


def test_one_file_and_one_row():
    assert files_that_name("GatedAttentionConfig") == {
        "tests/seams/gated_attention.py",
        "tests/seams/test_gated_attention.py",
    }
