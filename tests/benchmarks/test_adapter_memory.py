"""Memory by optimizer and method: the page has the stored cells, and a tiny cell agrees with the formula."""

from __future__ import annotations

import pytest

from benchmarks.memory.adapters import BEGIN, END, METHODS, OPTIMIZERS, PAGE, cell, main, run_of, stored, table
from jaxllm.data import DataConfig
from jaxllm.train import RunConfig
from tests import tiny


def test_the_page_has_the_stored_cells() -> None:
    page = PAGE.read_text()
    start = page.index(BEGIN) + len(BEGIN)
    assert page[start : page.index(END, start)] == table(stored()), "python -m benchmarks.memory.adapters --table"
    assert set(stored()) <= {f"{optimizer} {method}" for optimizer in OPTIMIZERS for method in METHODS}
    assert len(stored()) >= 14


@pytest.mark.parametrize("name", stored())
def test_the_formula_agrees_with_the_stored_cells(name: str) -> None:
    """State within 1%, a step within 16%."""
    one = stored()[name]
    assert one["predicted arguments"] == pytest.approx(one["arguments"], rel=0.01)
    assert one["predicted"] == pytest.approx(one["total"], rel=0.16)


@pytest.mark.drawn(0.3)
def test_a_tiny_cell() -> None:
    """Compiled anew; of arrays as small as these a step is mostly padding, so that the state alone is compared."""
    model = tiny.decoder(
        heads=2, kv_heads=2, head_dim=16, embed_dim=64, mlp=128, layers=2, remat="full", dtype="float32"
    )
    tiny_run = RunConfig(model=model, data=DataConfig(batch_size=2, seq_len=16), mesh="data=1")
    found = cell(run_of("lion", "lora", tiny_run), "v5e:1x1")
    assert found["arguments"] == pytest.approx(found["predicted arguments"], rel=0.1)
    assert found["total"] > found["arguments"] > 1000


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--optimizers", "adam"])
    assert "'adam' is not one of adamw, lion" in capsys.readouterr().err
