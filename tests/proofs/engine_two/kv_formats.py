"""Quantised KV cache: its bytes, its errors, its effect on quality, and equal results in every mode of the engine."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxllm.data import corpus
from jaxllm.infer import LLM, EngineConfig, SamplingParams
from jaxllm.infer.decode_benchmark import kv_bytes_per_token
from jaxllm.infer.engine_config import KvDtype
from pallas_kernels.paged_attention import PageFormat, Slots
from tests import environment
from tests.infer import engines, meshes
from tests.proofs.engine.programs import Compilations
from tests.proofs.harness import proof

ROOT = environment.ROOT
NLL = [(kv, text) for text in ("plays", "documentation") for kv in ("bfloat16", "int8", "fp8")]
"""(format, text)."""
READ, ROW = 1024, 512
"""Tokens of a text, and of a prompt."""


@functools.cache
def nll(kv: KvDtype, text: str) -> float:
    """Mean NLL of a text's tokens, as an engine scores prompts: in chunks of 256, each over the pages before it."""
    sizes = EngineConfig(
        max_sequences=2,
        max_batched_tokens=256,
        max_len=ROW + 32,
        pages=40,
        buckets=(256,),
        samplers=("full",),
        decode_steps=1,
        kv_dtype=kv,
    )
    llm = LLM("smollm2", sizes, strict=True, manifest=ROOT / ".cache" / "jaxllm" / "engine")
    files = {"plays": corpus.path("heldout"), "documentation": ROOT / "docs" / "train" / "pipeline.md"}
    ids = llm.ids(files[text].read_text("utf-8")[: 8 * READ])[:READ]
    assert len(ids) == READ
    made = llm.generate([ids[:ROW], ids[ROW:]], SamplingParams(max_tokens=1, prompt_logprobs=0))
    scores = [score for one in made for score, _ in one.prompt_scores]
    assert len(scores) == READ - 2
    return -float(np.mean(scores))


@proof("engine_two", cases=NLL, sample=1, bound=0.005)
def kv_formats_nll(case: tuple[KvDtype, str]) -> float:
    """The real SmolLM2 on real text: change of the negative log-likelihood, relative to pages in float32."""
    kv, text = case
    before, after = nll("auto", text), nll(kv, text)
    assert 1.0 < before < 6.0
    assert after != before
    return abs(after / before - 1)


BYTES = [
    ("llama", "auto", 4, "tensor=1"),
    ("llama", "bfloat16", 8, "tensor=1"),
    ("llama", "int8", 8, "tensor=1"),
    ("llama", "fp8", 4, "tensor=1"),
    ("smollm2", "int8", 32, "tensor=1"),
    ("gemma3", "int8", 4, "tensor=1"),
    ("gemma3", "fp8", 8, "tensor=1"),
    ("deepseek_v3", "bfloat16", 8, "tensor=1"),
    ("deepseek_v3", "int8", 4, "tensor=1"),
    ("deepseek_v3", "fp8", 8, "tensor=1"),
    ("gpt_oss", "fp8", 4, "tensor=1"),
    ("llama", "int8", 8, "tensor=2"),
    ("wide", "fp8", 4, "data=2,tensor=2"),
]
"""(model, format, positions of a page, mesh)."""


@proof("engine_two", cases=BYTES, sample=1, bound={"bytes": 0.0, "temporaries": 0.0})
def kv_format_bytes(case: tuple[str, KvDtype, int, str]) -> dict[str, float]:
    """Argument bytes of engines that differ only in their pages, less the stated ones; temporaries."""
    model, kv, page, mesh = case
    made = []
    for pages in (40, 90):
        sizes = EngineConfig(
            max_sequences=1, max_batched_tokens=8, max_len=32, page_size=page, pages=pages,
            buckets=(8,), samplers=("plain",), decode_steps=2,
            kv_dtype=kv,
        )  # fmt: skip
        device: Any = meshes.over(mesh, model, sizes).runner
        made.append(device)
    few, many = made
    shards = 2 if "tensor=2" in mesh else 1
    grown = 0
    for group, before, after in zip(few.spec.groups, few.spec.pages, many.spec.pages, strict=True):
        grown += (after - before) * page * group.token_bytes(shards)
    assert grown > 0
    if mesh == "tensor=1":
        assert few.token_bytes == kv_bytes_per_token(engines.model_of(model, "float32"), kv)
    worst = {"bytes": 0.0, "temporaries": 0.0}
    for name in few.programs:
        if name.split("-")[0] in ("prompt", "decode"):
            before, after = (device.programs[name].memory for device in made)
            more = after.argument_size_in_bytes - before.argument_size_in_bytes
            worst["bytes"] = max(worst["bytes"], abs(more - grown / shards))
            more = after.temp_size_in_bytes - before.temp_size_in_bytes
            worst["temporaries"] = max(worst["temporaries"], float(more))
    return worst


FORMS = [(False, 64, 64), (False, 5, 9), (False, 1, 1), (True, 36, 32), (True, 8, 8)]
"""(latent, head dim of keys, of values)."""


@proof("engine_two", count=200, sample=2, bound={"int8": 1.0001, "fp8": 1.0001})
def kv_round_trip(seed: int) -> dict[str, float]:
    """Keys and values of all sizes, zeros among them: the error of each number over the bound of its token and head."""
    rng = np.random.default_rng(seed)
    worst = {}
    for encoding in ("int8", "fp8"):
        latent, key, value = FORMS[rng.integers(len(FORMS))]
        form = PageFormat(1 if latent else 3, key, value, latent, encoding, int(rng.choice([1, 8])))
        dtype, many = str(rng.choice(["float32", "bfloat16"])), (40, form.kv_heads, 1)
        sizes = 10.0 ** rng.uniform(-15, 15, many) * (rng.random(many) > 0.1)
        k, v = (jnp.asarray(sizes * rng.standard_t(2, (*many[:2], n)), dtype) for n in (key, value))
        kept = form.pack(k, None if latent else v, dtype)
        read = form.unpack(Slots(kept.data[:, :, None], kept.scales[..., None]), "float32")[:, :, 0]
        want = np.asarray(k if latent else jnp.concatenate([k, v], -1), np.float64)
        got, scales = np.asarray(read, np.float64)[..., : want.shape[-1]], np.asarray(kept.scales, np.float64)
        scale = np.repeat(scales, form.parts, axis=-1)
        bound = scale / 2 if encoding == "int8" else np.maximum(np.abs(want) / 16, scale / 1024)
        assert np.all(got[bound == 0.0] == 0.0)
        error = np.abs(got - want)
        worst[encoding] = float(np.max(error[bound > 0.0] / bound[bound > 0.0], initial=0.0))
    return worst


AGREE = [
    ("roomy", "llama", "int8", ""),
    ("roomy", "gemma3", "fp8", ""),
    ("tight, recompute", "llama", "fp8", ""),
    ("tight, recompute", "deepseek_v3", "int8", ""),
    ("tight, swap", "gpt_oss", "int8", ""),
    ("tight, swap", "deepseek_v3", "fp8", ""),
    ("tight, swap", "llama", "bfloat16", ""),
    ("contiguous", "gemma3", "int8", ""),
    ("layers apart", "llama", "fp8", ""),
    ("invariant", "smollm2", "int8", ""),
    ("tight, swap", "llama", "int8", "tensor=2"),
    ("tight, swap", "deepseek_v3", "fp8", "tensor=2"),
    ("tight, recompute", "wide", "fp8", "data=2,tensor=2"),
    ("tight, swap", "mixtral", "int8", "expert=2,tensor=2"),
]
"""(way to serve, model, format, mesh)."""


@proof("engine_two", cases=AGREE, sample=1, float64=True, bound=1e-6)
def kv_formats_in_every_way(case: tuple[str, str, KvDtype, str]) -> float:
    """Random traffic in any way, less the same one after the other without prefixes; nothing is compiled meanwhile.

    Both in float64. What is kept of a token is the same whoever writes it, but for a scale between two float32: the
    bound has room for those, and none for a token that is read as it was before it was rounded.
    """
    way, model, kv, mesh = case
    config = dataclasses.replace(engines.ENGINES[way], kv_dtype=kv)
    apart = way == "layers apart"
    if mesh:
        engine = meshes.over(mesh, model, config, "float64", apart=apart)
    else:
        engine = engines.build(config, model, "float64", apart=apart)
    alone = engines.build(dataclasses.replace(engines.ENGINES["one after the other"], kv_dtype=kv), model, "float64")
    rng, heard = np.random.default_rng([*way.encode(), *model.encode(), *mesh.encode()]), Compilations()
    asked = engines.traffic(rng, engine.config, 10)
    for one in asked:
        one["cancel"] = None
    with heard:
        made = engines.serve(engine, asked)
    assert heard.names == []
    worst, off = 0.0, []
    for one, two in zip(made, engines.serve(alone, asked), strict=True):
        assert [s.finish for s in one.sequences] == [s.finish for s in two.sequences]
        for left, right in zip(one.sequences, two.sequences, strict=True):
            assert left.tokens == right.tokens
            worst = max(worst, float(np.abs(np.subtract(left.logprobs, right.logprobs)).max(initial=0.0)))
            exact = engines.logprobs_of(model, "float64", left.tokens)
            places = range(len(one.prompt), len(left.tokens))
            off += [abs(exact[i - 1, left.tokens[i]] - left.logprobs[i - len(one.prompt)]) for i in places]
        scores = (np.array([s for s, _ in x.prompt_scores]) for x in (one, two))
        worst = max(worst, float(np.abs(np.subtract(*scores)).max(initial=0.0)))
    assert 1e-5 < float(np.median(off)) < 0.5, f"pages hold what was computed, or something else: {np.median(off)}"
    return worst
