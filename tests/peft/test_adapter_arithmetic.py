"""Sums and differences of adapters, beside those of their dense products."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.cli.main import main
from jaxllm.peft import AdapterError, merged_params, read_peft, write_peft
from jaxllm.peft.adapter_arithmetic import ModuleProduct, add_adapters, difference, open_adapter
from tests.peft.test_peft_files import LLAMA, base, drawn

pytestmark = pytest.mark.usefixtures("float64")


def written(folder: Path, seed: int, only: tuple[str, ...] = ("q", "down"), rank: int = 3, kind: str = "lora") -> Path:
    model = base(LLAMA)
    adapter = drawn(model, kind, rank, only)
    rng = np.random.default_rng(seed)
    factors = {path: jax.tree.map(lambda x: rng.normal(size=x.shape), one) for path, one in adapter.factors.items()}
    path = folder / f"adapter_{seed}"
    write_peft(path, dataclasses.replace(adapter, factors=factors, base="one", base_hash="float64:1"), model, LLAMA)
    return path


def dense(path: Path) -> dict[str, np.ndarray]:
    return {name: one.b @ one.a for name, one in open_adapter(path).products.items()}


def test_a_sum_is_that_of_the_products(tmp_path: Path) -> None:
    """Of other modules and ranks; it loads as an adapter, and merging it adds the dense sum."""
    one, other = written(tmp_path, 1), written(tmp_path, 2, ("q", "up"), 2, "rslora")
    assert main(["adapters", "add", str(tmp_path / "sum"), f"0.5:{one}", f"-2:{other}"]) == 0
    a, b, got = dense(one), dense(other), dense(tmp_path / "sum")
    assert got.keys() == a.keys() | b.keys()
    for name, value in got.items():
        np.testing.assert_allclose(value, 0.5 * a.get(name, 0) - 2 * b.get(name, 0), rtol=0, atol=1e-12)
    model = base(LLAMA)
    params = model.init(jax.random.key(0))
    merged = merged_params(model, params, read_peft(tmp_path / "sum", model, LLAMA))
    up = merged["segments"]["0"]["0"]["mlp"]["up"] - params["segments"]["0"]["0"]["mlp"]["up"]
    np.testing.assert_allclose(up[1], got["model.layers.1.mlp.up_proj"].T, rtol=0, atol=1e-12)
    assert json.loads((tmp_path / "sum/base.json").read_text())["hash"] == "float64:1"


def test_a_lower_rank_is_the_nearest(tmp_path: Path, rng: Any) -> None:
    """The truncated singular value decomposition of the dense product."""
    product = ModuleProduct(rng.normal(size=(5, 9)), rng.normal(size=(7, 5)))
    u, s, vt = np.linalg.svd(product.b @ product.a)
    lower = product.to_rank(2)
    np.testing.assert_allclose(lower.b @ lower.a, u[:, :2] * s[:2] @ vt[:2], rtol=0, atol=1e-12)
    path = written(tmp_path, 1)
    errors = add_adapters([open_adapter(path)], [1.0], tmp_path / "low", rank=1)
    for name, value in dense(path).items():
        s = np.linalg.svd(value, compute_uv=False)
        assert errors[name] == pytest.approx(np.sqrt((s[1:] ** 2).sum() / (s**2).sum()), rel=1e-6)
    assert open_adapter(tmp_path / "low").config["r"] == 1


def test_differences_and_lists(tmp_path: Path, capsys: Any) -> None:
    one, other = written(tmp_path, 1), written(tmp_path, 2)
    assert main(["adapters", "diff", str(one), str(one)]) == 0
    assert main(["adapters", "diff", str(one), str(other)]) == 1
    a, b = dense(one), dense(other)
    for row in difference(open_adapter(one), open_adapter(other)):
        x, y = a[row.module], b[row.module]
        assert row.relative == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-9)
        assert row.cosine == pytest.approx(np.vdot(x, y) / np.linalg.norm(x) / np.linalg.norm(y), abs=1e-12)
    capsys.readouterr()
    assert main(["adapters", "ls", str(tmp_path)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 2
    assert "lora, rank 3, 4 modules" in listed[0]


def test_what_has_no_sum_is_named(tmp_path: Path, capsys: Any) -> None:
    one, dora = written(tmp_path, 1), written(tmp_path, 3, kind="dora")
    with pytest.raises(AdapterError, match="is no sum"):
        difference(open_adapter(one), open_adapter(dora))
    for arguments, says in (
        ([f"x:{one}"], "WEIGHT:ADAPTER"),
        ([], "at least one adapter"),
        ([str(one), "--rank", "0"], "rank = 0"),
        ([str(tmp_path / "none")], "no adapter_config.json"),
    ):
        assert main(["adapters", "add", str(tmp_path / "out"), *arguments]) == 2
        assert says in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
