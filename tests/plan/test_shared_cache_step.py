"""Steps whose KV cache devices share: latents in slices, and pages spread over context."""

from __future__ import annotations

import dataclasses

import pytest

from jaxllm.config import ConfigError
from jaxllm.infer.runner.latent_rotation import with_slices
from jaxllm.infer.runner.paged_cache import layer_groups
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MLAConfig, MlpConfig
from jaxllm.plan.formulas.serving_step import BatchWork
from jaxllm.simulate import Deployment, make_trace, simulate
from sharding import ShardingError
from tests.simulate.served import MODEL, deployment

LATENT = dataclasses.replace(
    MODEL,
    pattern=(
        BlockConfig(MLAConfig(8, latent=64, q_latent=32, nope_dim=32, rope_dim=16, value_dim=32), MlpConfig(512)),
    ),
)
DECODES, CONTINUED, FRESH = BatchWork.of([300, 200], [1, 1]), BatchWork.of([300, 200], [1, 8]), BatchWork.of([0], [16])


def latents(mla: str = "tpla", tensor: int = 4, model: DecoderConfig = LATENT, **sizes) -> Deployment:
    return deployment(f"h100:1x{tensor}", f"tensor={tensor}", model=model, mla=mla, **sizes)


def spread(kv_span: bool = True, model: DecoderConfig = MODEL, **sizes) -> Deployment:
    return deployment("h100:1x4", "context=4", model=model, kv_span=kv_span, **sizes)


def test_a_slice_is_a_share_of_the_latent():
    """Of 64 + 16 numbers in bfloat16 a device of four has 16 + 16, in four layers."""
    exact, sliced = latents("exact"), latents()
    assert exact.step_model.token_bytes == 4 * 80 * 2
    assert sliced.step_model.token_bytes == sliced.step_model.group_token_bytes(0) == 4 * 32 * 2
    (engines_own,) = layer_groups(with_slices(LATENT, 4))
    assert engines_own.page_bytes(16, 4) / 4 == 16 * sliced.step_model.token_bytes
    assert latents(pages=None).spec.pages[0] > 2.4 * latents("exact", pages=None).spec.pages[0]
    assert latents().name == "tensor=4, bfloat16, tpla"


def test_slices_of_decoding_are_all_heads_and_travel_twice():
    exact, sliced = (one.step_model for one in (latents("exact"), latents()))
    own, shared = exact._attention(DECODES, 1), sliced._attention(DECODES, 1)
    assert own.flops == 2 * 4 * 502 * 2 * (80 + 64)
    assert shared.flops == 2 * 4 * 502 * 8 * (32 + 16)
    assert shared.bytes == own.bytes * 32 / 80
    sent = sum(sliced._collective("all-to-all", "tensor", 2 * 8 * width * 2) for width in (32, 16))
    more = sliced.step([DECODES], 2, 2).network - exact.step([DECODES], 2, 2).network
    assert more == pytest.approx(4 * sent)


def test_prompts_attend_exactly():
    """Fresh ones cost what they cost without slices; later chunks gather what their tables cover."""
    exact, sliced = (one.step_model for one in (latents("exact"), latents()))
    for name in ("flops", "network", "launch"):
        assert getattr(sliced.step([FRESH], 16, 1), name) == pytest.approx(getattr(exact.step([FRESH], 16, 1), name))
    found, plain = sliced.step([CONTINUED], 16, 2), exact.step([CONTINUED], 16, 2)
    gathered = 4 * (16 * 512) * (32 * 2 + 2 * 64 * 2)
    assert found.bytes == pytest.approx(plain.bytes + 4 * 509 * 32 * 2 - 4 * 509 * (80 - 32) * 2 + gathered)
    assert found.network > plain.network + 4 * sliced._collective("all-gather", "tensor", 16 * 512 * 64 * 2)


def test_spread_pages_are_shared_work():
    whole, parts = (one.step_model for one in (spread(False), spread()))
    (engines_own,) = layer_groups(MODEL)
    assert parts.token_bytes == whole.token_bytes / 4 == engines_own.page_bytes(16) / 16 / 4
    for name in ("flops", "bytes", "seconds"):
        assert getattr(parts._attention(DECODES, 1), name) == pytest.approx(
            getattr(whole._attention(DECODES, 1), name) / 4
        )
    joined = 4 * parts._collective("all-reduce", "context", 2 * 8 * (32 + 2) * 4)
    assert parts.step([DECODES], 2, 2).network == pytest.approx(joined)
    assert whole.step([DECODES], 2, 2).network == 0


def test_a_sequence_may_be_longer_than_a_device_has_pages_for():
    assert spread(pages=9).spec.pages == (36,)
    found = simulate(spread(pages=9), make_trace("poisson:100", lengths="400/20", count=4))
    assert [one.result.tokens for one in found.requests] == [20] * 4
    ratio = spread(pages=None).spec.pages[0] / spread(False, pages=None).spec.pages[0]
    assert ratio == pytest.approx(4, rel=0.01)


def test_what_the_engine_refuses_is_refused_with_its_words():
    with pytest.raises(ConfigError, match="the mesh has none: give tensor=2"):
        _ = latents(tensor=1).step_model
    with pytest.raises(ConfigError, match="slices MLA latents, and the model has none"):
        _ = latents(model=MODEL).step_model
    odd = BlockConfig(dataclasses.replace(LATENT.pattern[0].attention, latent=60), MlpConfig(512))
    with pytest.raises(ConfigError, match=r"latents of \[60\], which tensor=8 does not divide"):
        _ = latents(tensor=8, model=dataclasses.replace(LATENT, pattern=(odd,))).step_model
    with pytest.raises(ShardingError, match="kv_span spreads pages over context"):
        _ = deployment("h100:1x2", "tensor=2", kv_span=True).step_model
    with pytest.raises(ShardingError, match="latent attention does not go with context=4"):
        _ = spread(model=LATENT).step_model
    with pytest.raises(ConfigError, match="kv_span does not go with mla = 'tpla'"):
        latents(kv_span=True)


def test_windows_are_shared_too():
    """Whole pages of a window's pool on each device."""
    near = dataclasses.replace(MODEL, pattern=(BlockConfig(AttentionConfig(8, 4, 32, window=40), MlpConfig(512)),))
    assert spread(model=near).spec.pages[0] % 4 == 0
