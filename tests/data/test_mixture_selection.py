"""Data selection: Sinkhorn's algorithm, the n-gram embedding, laws of the loss, the search, the sources table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import ot
import pytest

from jaxllm.config import ConfigError
from jaxllm.data import DataError, SourceConfig
from jaxllm.data.selection import mixture_laws, ngram_embedding, optimal_transport, simplex_search
from jaxllm.data.selection.sources_table import read_sources, write_sources
from jaxllm.data.token_files import TokenDocuments


def test_sinkhorn_is_that_of_pot(float64, rng):
    a, b, cost = rng.dirichlet(np.ones(17)), rng.dirichlet(np.ones(9)), rng.random((17, 9))
    found = optimal_transport.sinkhorn(a, b, cost, 0.05)
    plan = optimal_transport.transport_plan(a, b, cost, 0.05, found)
    expected = ot.sinkhorn(a, b, cost, 0.05, method="sinkhorn_log", numItermax=100_000, stopThr=1e-13)
    np.testing.assert_allclose(plan, expected, rtol=0, atol=1e-10)
    assert float(found.marginal_error) <= 1e-11


def test_distance_is_zero_to_itself_and_its_gradient_is_the_potential(float64, rng):
    """Also on the boundary of the simplex, where a source has no weight."""
    sources = [rng.normal(size=(12, 5)) + shift for shift in (0.0, 0.5, 1.0)]
    same = optimal_transport.MixtureDistance(sources, np.concatenate(sources), 0.2)
    assert abs(float(same(jnp.full(3, 1 / 3)))) < 1e-10
    distance = optimal_transport.MixtureDistance(sources, rng.normal(size=(9, 5)) + 0.4, 0.2)
    for shares in ([0.2, 0.3, 0.5], [0.6, 0.4, 0.0]):
        gradient = jax.grad(distance)(jnp.array(shares))
        step = 1e-5 * jnp.array([1.0, -1.0, 0.0])
        slope = (distance(jnp.array(shares) + step) - distance(jnp.array(shares) - step)) / 2
        assert abs(float(slope - gradient @ step)) < 1e-6 * 1e-5
        assert float(distance(jnp.array(shares))) > 0.01


def documents(*texts: bytes) -> TokenDocuments:
    lengths = np.array([len(text) for text in texts])
    tokens = np.frombuffer(b"".join(texts), np.uint8).astype(np.uint16)
    return TokenDocuments(tokens, np.cumsum(lengths) - lengths, lengths, "some", "x")


def test_windows_lie_inside_documents_and_are_drawn_by_tokens():
    some = documents(b"a" * 900, b"b" * 90, b"cc")
    windows = ngram_embedding.sample_windows(some, 400, 64, seed=3)
    assert all(len(set(one.tolist())) == 1 for one in windows)
    assert {len(one) for one in windows} <= {64, 2}
    share = np.mean([one[0] == ord("a") for one in windows])
    assert 0.85 < share < 0.95
    assert [one.tolist() for one in windows] == [
        one.tolist() for one in ngram_embedding.sample_windows(some, 400, 64, seed=3)
    ]


def test_embedding_is_stable_and_near_for_like_texts():
    """The first numbers are fixed: results of searches are kept and compared between machines."""
    to_be, or_not, numbers = (
        ngram_embedding.embed_tokens(np.frombuffer(text, np.uint8).astype(np.uint16))
        for text in (
            b"To be, or not to be, that is the question",
            b"Or not to be, the question is that",
            b"31415926535",
        )
    )
    assert abs(np.linalg.norm(to_be) - 1) < 1e-12
    assert to_be @ or_not > 0.5 > 0.2 > abs(to_be @ numbers)
    assert ngram_embedding.embed_tokens(np.zeros(0, np.uint16)).tolist() == [0.0] * ngram_embedding.WIDTH


def test_mixtures_are_spread_over_the_simplex():
    few, many = simplex_search.spread_mixtures(3, 6), simplex_search.spread_mixtures(3, 15)
    assert few.tolist() == many[:6].tolist()
    assert many.sum(axis=1) == pytest.approx(1)
    assert len(np.unique(many, axis=0)) == 15
    assert sorted(few[1:4].tolist()) == [[0.05, 0.05, 0.9], [0.05, 0.9, 0.05], [0.9, 0.05, 0.05]]
    assert many.min() == 0.05
    assert simplex_search.spread_mixtures(20, 22).min() >= 0.02
    with pytest.raises(DataError, match="30 different mixtures of 2 sources, but in steps of 1/20 there are 19"):
        simplex_search.spread_mixtures(2, 30, parts=20)
    assert simplex_search.round_shares(np.array([1 / 3, 1 / 3, 1 / 3]), 100).tolist() == [0.34, 0.33, 0.33]


def test_search_finds_the_minimum_inside_and_on_the_boundary(float64):
    inside, outside = jnp.array([0.5, 0.2, 0.3]), jnp.array([0.9, 0.4, -0.3])
    for target, expected in ((inside, [0.5, 0.2, 0.3]), (outside, [0.75, 0.25, 0.0])):
        found = simplex_search.minimise_on_simplex(
            lambda p, to=target: jnp.sum((p - to) ** 2), np.full((1, 3), 1 / 3), tolerance=1e-12
        )
        assert found.shares == pytest.approx(expected, abs=1e-3)


def test_laws_recover_what_they_can_express(float64, rng):
    shares = simplex_search.spread_mixtures(3, 16)
    distance = lambda p: jnp.sum((p - jnp.array([0.2, 0.7, 0.1])) ** 2)  # noqa: E731
    coefficients = rng.normal(size=12) / 5
    exact = np.array(
        [float(mixture_laws.transport_features(jnp.array(p), distance(jnp.array(p))) @ coefficients) for p in shares]
    )
    (found,) = mixture_laws.fit_transport_laws(distance, shares, np.exp(exact)[:, None])
    assert np.abs(found.left_out - exact).max() < 1e-3
    drawn = jnp.array(rng.dirichlet(np.ones(3)))
    expected = mixture_laws.transport_features(drawn, distance(drawn)) @ coefficients
    assert abs(float(found(drawn) - expected)) < 1e-3

    losses = 1.5 + np.exp(shares @ np.array([0.3, -1.0, -0.2]))
    law = mixture_laws.fit_mixing_law(shares, losses)
    drawn_loss = 1.5 + np.exp(float(drawn @ np.array([0.3, -1.0, -0.2])))
    assert abs(float(jnp.exp(law(drawn))) / drawn_loss - 1) < 2e-3  # floors are tried on a grid


def test_left_out_predictions_are_those_of_separate_fits(float64, rng, monkeypatch):
    """Without a penalty, which is of standardised features and would differ a little once a run is left out."""
    monkeypatch.setattr(mixture_laws, "PENALTIES", np.array([1e-13]))
    shares = simplex_search.spread_mixtures(3, 20)
    distance = lambda p: jnp.exp(p[0]) + jnp.sin(3 * p[1])  # noqa: E731
    losses = 2 + rng.random(20)
    (found,) = mixture_laws.fit_transport_laws(distance, shares, losses[:, None])
    design = np.array([mixture_laws.transport_features(jnp.array(p), distance(jnp.array(p))) for p in shares])
    for number in (0, 5, 19):
        kept = np.delete(np.arange(20), number)
        direct = np.linalg.lstsq(design[kept], np.log(losses[kept]), rcond=1e-10)[0]
        assert abs(design[number] @ direct - found.left_out[number]) < 1e-6


def test_the_penalty_is_chosen_for_the_projection(rng):
    """Noise that the projection multiplies asks for a larger penalty, thus for smaller coefficients."""
    shares = simplex_search.spread_mixtures(3, 16)
    distance = lambda p: jnp.exp(p[0]) + jnp.sin(3 * p[1])  # noqa: E731
    small = 2 * np.exp(0.3 * shares[:, 0])
    norms = []
    for _ in range(4):  # with one draw of the noise both may choose the same penalty
        losses = np.stack([small * (1 + 0.01 * rng.normal(size=16)), 0.9 * small], axis=1)
        _, exact = mixture_laws.fit_transport_laws(distance, shares, losses, (0.0, 1.0))
        _, far = mixture_laws.fit_transport_laws(distance, shares, losses, mixture_laws.projection_weights((1, 2), 64))
        norms.append([np.linalg.norm(one.coefficients) for one in (far, exact)])
    assert np.mean(norms, axis=0)[0] < np.mean(norms, axis=0)[1], norms


def test_projection_is_exact_for_power_laws():
    sizes = (1_000, 4_000)
    losses = [3.0 * n**-0.1 for n in sizes]
    small, large = (lambda p, value=value: jnp.log(value) for value in losses)
    law = mixture_laws.ProjectedLaw(small, large, sizes, 64_000)
    assert float(jnp.exp(law(jnp.ones(1)))) == pytest.approx(3.0 * 64_000**-0.1, rel=1e-6)
    assert mixture_laws.projection_weights(sizes, 4_000) == (0.0, 1.0)
    assert mixture_laws.projection_weights(sizes, 1_000) == (1.0, 0.0)


def test_rank_correlation():
    assert mixture_laws.rank_correlation(np.array([1.0, 2, 3, 4]), np.array([1.0, 8, 9, 100])) == pytest.approx(1)
    assert mixture_laws.rank_correlation(np.array([1.0, 2, 3]), np.array([3.0, 2, 1])) == pytest.approx(-1)
    assert mixture_laws.rank_correlation(np.array([1.0, 1, 2]), np.array([1.0, 2, 3])) == pytest.approx(0.8660254)
    assert mixture_laws.rank_correlation(np.ones(3), np.arange(3.0)) == 0


def test_sources_table(tmp_path):
    table = tmp_path / "mixture.toml"
    sources = (SourceConfig('a "b"\\', ("ä.jsonl", "c.jsonl"), 0.25, max_epochs=2.5), SourceConfig("d", "d.txt", 0.75))
    write_sources(table, sources, "a note\nof two lines")
    assert table.read_text().startswith("# a note\n# of two lines\n\n[[sources]]\n")
    assert read_sources(table) == sources
    for text, error, message in (
        ("[[sources", DataError, "mixture.toml: not valid TOML"),
        ("a = 1", DataError, "a sources table has rows .* nothing else such as 'a'"),
        ("sources = []", DataError, "a sources table has rows"),
        ('[[sources]]\nname = "a"\nwieght = 1', ConfigError, "weight"),
        ('[[sources]]\nname = "a"\nweight = -1.0', ValueError, "it must be a positive number"),
    ):
        table.write_text(text)
        with pytest.raises(error, match=message):
            read_sources(table)
    with pytest.raises(DataError, match="no such file"):
        read_sources(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot say None"):
        write_sources(table, (SourceConfig("a", "a.txt", separator=None),))
