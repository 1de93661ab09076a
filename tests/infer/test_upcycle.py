"""Upcycling: a mixture of experts made of a dense model computes the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxllm.checkpoint.checkpoint_writer import StreamedLeaf
from jaxllm.convert.convert import convert
from jaxllm.convert.upcycle import upcycled_leaf
from jaxllm.hub import HubError, load_hf
from jaxllm.models import MoeConfig
from tests import quick
from tests.hub import peers


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(("family", "becomes"), [("mistral", "mixtral"), ("qwen3", "qwen3_moe")])
def test_the_first_forward_is_the_dense_models(family: str, becomes: str, tmp_path: Path, float64: None) -> None:
    seed = next(s for s in range(9) if dense_enough(family, s))
    peer = peers.peer(family, seed)
    before = peer.save(tmp_path / "dense")
    made = convert(before, tmp_path / "mixture", "hf", upcycle=3, top_k=2)
    config = json.loads((tmp_path / "mixture" / "config.json").read_text())
    assert config["model_type"] == becomes
    assert config["max_position_embeddings"] == peer.config["max_position_embeddings"]
    dense, mixture = (load_hf(path, dtype="float64") for path in (before, tmp_path / "mixture"))
    assert {type(block.mlp) for block in mixture.config.blocks} == {MoeConfig}
    want, got = (quick.logits(m.config, m.params, peer.tokens) for m in (dense, mixture))
    assert np.abs(got - want).max() < 1e-12 * np.abs(want).max()
    theirs = peers.logits_of(peers.opened(made.path), peer.tokens)
    assert np.abs(theirs - want).max() < 1e-4 * np.abs(want).max()
    router = mixture.params["segments"]["0"]["0"]["mlp"]["router"]
    assert float(np.std(router)) > 0.1 * router.shape[1] ** -0.5
    assert not list((tmp_path / "mixture").glob("checkpoint*"))


def dense_enough(family: str, seed: int) -> bool:
    """Whether a mixture's family has what this draw has."""
    config = peers.FAMILIES[family](np.random.default_rng([seed, *family.encode()]))
    return not getattr(config, "use_sliding_window", False)


@pytest.mark.drawn(0.3)
def test_what_cannot_be_upcycled_is_named(tmp_path: Path) -> None:
    gpt2 = peers.peer("gpt2", 0).save(tmp_path / "gpt2")
    with pytest.raises(HubError, match="have biases or no gate"):
        convert(gpt2, tmp_path / "out", "jaxllm", upcycle=4)
    mixtral = peers.peer("mixtral", 0).save(tmp_path / "mixtral")
    with pytest.raises(HubError, match="has experts already"):
        convert(mixtral, tmp_path / "out", "jaxllm", upcycle=4)
    gemma = peers.peer("gemma2", 0).save(tmp_path / "gemma2")
    with pytest.raises(HubError, match="no family of transformers has this architecture"):
        convert(gemma, tmp_path / "out", "hf", upcycle=4)
    with pytest.raises(HubError, match="top_k = 3 is for upcycle"):
        convert(gemma, tmp_path / "out", "hf", top_k=3)
    with pytest.raises(HubError, match="top_k = 2 of experts = 1; choose 1 or fewer"):
        convert(gemma, tmp_path / "out", "jaxllm", upcycle=1)
    assert not (tmp_path / "out").exists()
    made = convert(gemma, tmp_path / "out", "jaxllm", upcycle=2)
    assert made.tensors > 0


def test_copies_and_routers_by_hand() -> None:
    """Each layer's weights once for each expert, from slices that end anywhere; routers have the usual deviation."""
    values = np.arange(2 * 3 * 5, dtype=np.float32).reshape(2, 3, 5)
    pieces = np.split(values.reshape(-1), [4, 11, 17])
    dense = {"segments/0/0/mlp/up": StreamedLeaf(values.shape, np.dtype(np.float32), pieces)}
    leaf = upcycled_leaf("segments/0/0/mlp/experts/up", (2, 4, 3, 5), dense)
    made = np.concatenate([np.asarray(piece).reshape(-1).copy() for piece in leaf.pieces]).reshape(leaf.shape)
    np.testing.assert_array_equal(made, np.repeat(values[:, None], 4, axis=1))
    router = upcycled_leaf("segments/0/0/mlp/router", (2, 64, 50), dense)
    drawn = np.stack(list(router.pieces))
    assert drawn.shape == (2, 64, 50)
    assert np.std(drawn) == pytest.approx(1 / 8, rel=0.05)  # 6,400 draws: a deviation of 0.9%
    assert not np.array_equal(drawn[0], drawn[1])
