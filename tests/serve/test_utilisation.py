"""FLOPs and bytes of steps against sums over the weights, and their Prometheus metrics."""

from __future__ import annotations

import math

import httpx
import jax
import pytest

from jaxllm.compiler import device_peaks
from jaxllm.infer import SamplingParams
from jaxllm.infer.engine.engine_metrics import EngineMetrics, ProgramMetrics
from jaxllm.serve.utilisation import program_utilisation
from tests.serve import servers


@pytest.fixture
def engine(monkeypatch):
    """The tiny one, that has done nothing yet."""
    made = servers.tiny_engine()
    monkeypatch.setattr(made, "metrics", EngineMetrics())
    return made


def work(engine, prompt: int, made: int) -> None:
    engine.submit(range(1, prompt + 1), SamplingParams(max_tokens=made, ignore_eos=True, seed=0), salt=str(prompt))
    while engine.busy:
        engine.step()


def test_flops_and_bytes_are_those_of_the_weights(engine):
    prompt, made = 40, 7  # a prompt of two pieces, then loops of two tokens
    work(engine, prompt, made)
    found = program_utilisation(engine)
    assert {name.rsplit("-", 1)[0] for name in found} == {"prompt-32", "decode-1"}
    # Each weight of a matrix is one multiply-add a token; the embedding's is the head's, of tokens that are made.
    sizes = {jax.tree_util.keystr(p): x.size for p, x in jax.tree_util.tree_flatten_with_path(engine.runner.params)[0]}
    table, gains = sizes["['embedding']['table']"], sum(n for name, n in sizes.items() if "gain" in name)
    matrices = sum(sizes.values()) - table - gains
    layers, heads, head_dim, kv_heads = 2, 4, 8, 2
    through = prompt + made - 1  # the last token is not read
    attention = sum(4 * layers * heads * head_dim * (at + 1) for at in range(through))
    assert math.isclose(sum(u.flops for u in found.values()), 2 * matrices * through + 2 * table * made + attention)
    position = 2 * layers * kv_heads * head_dim * 4  # float32
    passes = 2 + made - 1
    read = 32 + 40 + sum(range(prompt + 1, through + 1))
    weights = 4 * (matrices + table + gains)
    moved = [u.moved for u in found.values()]
    assert None not in moved
    assert math.isclose(sum(moved), passes * weights + position * (read + through))
    assert sum(u.seconds for u in found.values()) > 0
    assert {(u.mfu, u.mbu) for u in found.values()} == {(None, None)}  # nobody knows what this processor can do


def test_windows_bound_what_is_attended():
    for start, count, window in ((0, 5, 3), (4, 1, 3), (7, 4, 3), (2, 6, None), (0, 2, 9), (5, 3, 1)):
        bucket = ProgramMetrics()
        bucket.add(start, count, window)
        met = [{at for at in range(q + 1) if window is None or q - at < window} for q in range(start, start + count)]
        assert bucket.attended == {window: sum(map(len, met))}
        assert bucket.read == {window: len(set.union(*met))}


def test_tokens_after_the_end_are_of_no_use():
    metrics = EngineMetrics()
    metrics.add_step("a", 1.0, [(3, 2, 2), (9, 0, 0)], [None], decode=True)
    metrics.add_step("a", 1.0, [(5, 0, 0)], [None], decode=True)
    assert metrics.programs == {"a": ProgramMetrics(2.0, 2, 2, 2, {None: 4 + 5}, {None: 4 + 5})}


def test_metrics_tell_shares_where_the_peak_is_known(engine, monkeypatch):
    work(engine, 5, 4)

    def told(url: str) -> dict[str, float]:
        lines = [line.split(" ") for line in httpx.get(f"{url}/metrics").text.splitlines() if 'bucket="' in line]
        return {name.replace(',model_name="tiny"', ""): float(value) for name, value in lines}

    with servers.running(servers.tiny_backend) as (_, url):
        plain = told(url)
        assert not any("mfu" in name or "mbu" in name for name in plain)
        monkeypatch.setitem(device_peaks.PEAKS, "cpu", device_peaks.Peak(1e12, 1e9))
        known = told(url)
    buckets = {name.split('bucket="')[1] for name in plain}
    assert len(buckets) == 2
    for one in buckets:
        seconds = known[f'jaxllm:step_seconds_total{{bucket="{one}']
        flops, moved = (known[f'jaxllm:model_{what}_total{{bucket="{one}'] for what in ("flops", "moved"))
        assert math.isclose(known[f'jaxllm:mfu{{bucket="{one}'], flops / seconds / 1e12)
        assert math.isclose(known[f'jaxllm:mbu{{bucket="{one}'], moved / seconds / 1e9)


def test_the_configuration_says_what_is_in_effect():
    with servers.running(servers.tiny_backend) as (_, url):
        found = httpx.get(f"{url}/config").json()["backend"]
    assert {"engine", "policy", "max_len", "page_size", "pages", "parameters", "cache", "devices", "programs"} <= set(
        found
    )
    assert found["cache"]["token_bytes"] > 0
    assert found["programs"]["names"]
    assert found["programs"]["late"] == 0
