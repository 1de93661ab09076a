"""Cache seams: a 2-bit KV format and a rule that drops every other token, each one file and one row, served exactly."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllm.convert.load import LoadedModel
from jaxllm.infer import LLM, Engine, EngineConfig, SamplingParams
from jaxllm.infer.runner.paged_cache import layer_groups
from jaxllm.models import functional
from jaxllm.text import ByteTokenizer
from sharding import ShardingError
from tests import environment
from tests.infer import engines, meshes
from tests.infer.proposers import OracleProposer
from tests.seams import every_other_token, int2_kv_format
from tests.seams.dense_reference import DenseReference, error

RULE = every_other_token.EveryOtherToken()
DROPPED = DenseReference("plain", RULE.keep)
BOTH = DenseReference("int2", RULE.keep)


def config(way: str, kv_dtype: str = "auto", retention: str | None = None, **fields) -> EngineConfig:
    """One of ENGINES with a technique."""
    cache = {} if retention is None else {"prefix_cache": False}
    return dataclasses.replace(engines.ENGINES[way], kv_dtype=kv_dtype, retention=retention, **cache, **fields)


def served_error(
    engine: Engine, model: str, reference: DenseReference, rng: np.random.Generator, many: int = 6
) -> float:
    """Error of random traffic against the reference, where the training forward computes something else."""
    asked = engines.traffic(rng, engine.config, many)
    long = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0)
    asked += [{"prompt": rng.integers(0, engines.VOCAB, n).tolist(), "params": long} for n in (17, 5)]
    for one in asked:  # the references score completions alone
        one["params"] = dataclasses.replace(one["params"], prompt_logprobs=None, logprobs=one["params"].logprobs or 0)
    made = engines.serve(engine, asked)
    assert error(model, DenseReference(), made) > 1e-4
    return error(model, reference, made)


@pytest.mark.drawn(0.3)
def test_sharded(rng, float64):
    """Both at once, heads over two devices, and two replicas. More: `make proof seams ONLY=served_as_the_reference`."""
    sizes = config("tight, swap", "int2", "every_other_token", max_sequences=1, decode_steps=1)
    engine = meshes.over("data=2,tensor=2", "wide", sizes, "float64")
    assert served_error(engine, "wide", BOTH, rng) <= 1e-10


@pytest.mark.drawn(0.3)
def test_through_the_llm(rng, float64):
    """Both at once, as a user serves them."""
    model, params = functional(engines.model_of("llama", "float64")), engines.params_of("llama", "float64")
    loaded = LoadedModel(
        model, params, ByteTokenizer(), None, jax.sharding.Mesh(jax.devices()[:1], ("data",)), 0, {}, None
    )
    sizes = config("tight, recompute", "int2", "every_other_token", max_sequences=2)
    llm = LLM(loaded, sizes, manifest=None)
    ids = rng.integers(0, engines.VOCAB, (5, 9)).tolist()
    asked = SamplingParams(max_tokens=30, seed=1, logprobs=0)
    made = llm.generate(ids, asked)
    requests = [llm.engine.submit(one, asked) for one in ids]
    while llm.engine.busy:
        llm.engine.step()
    assert error("llama", BOTH, requests) <= 1e-10
    assert [c.outputs[0].tokens for c in made] == [tuple(r.sequences[0].tokens[9:]) for r in requests]


def most_pages(retention: str | None) -> int:
    """The most pages of 4 entries that a sequence of 60 tokens holds at a time."""
    sizes = config("roomy", retention=retention, page_size=4, max_sequences=1, decode_steps=1, samplers=("plain",))
    engine = engines.build(dataclasses.replace(sizes, prefix_cache=False), "llama")
    engine.submit([1, 2, 3], SamplingParams(max_tokens=57, temperature=0.0))
    held = 0
    while engine.busy:
        engine.step()
        engines.check_books(engine)
        held = max([held, *(len(s.pages[0]) for s in engine.scheduler.running)])
    return held


@pytest.mark.drawn(0.3)
def test_pages_follow_the_tokens_that_are_kept():
    """A sequence of 60 tokens is in 8 pages of 4, not 15: half of its tokens, and the last."""
    assert most_pages("every_other_token") == 8


@pytest.mark.drawn(0.3)
def test_verification_under_a_rule(rng, float64):
    """Entries of refused tokens leave; those that only accepted tokens let go stay away."""
    sizes = config("tight, swap", "auto", "every_other_token", max_sequences=2, verify_tokens=3)
    oracle = OracleProposer("silent", rng, engines.VOCAB)
    engine = engines.build(sizes, "llama", "float64", proposer=oracle)
    asked = [
        one | {"cancel": None, "params": dataclasses.replace(one["params"], prompt_logprobs=None, logprobs=0)}
        for one in engines.traffic(rng, sizes, 6)
    ]
    want = engines.serve(engine, asked)
    oracle.learn(want)
    assert engine.metrics.proposed_tokens == 0
    oracle.mode = "some"
    got = engines.serve(engine, asked)
    assert [s.tokens for r in got for s in r.sequences] == [s.tokens for r in want for s in r.sequences]
    assert 0 < engine.metrics.accepted_tokens < engine.metrics.proposed_tokens
    assert error("llama", DROPPED, [*want, *got]) <= 1e-10


def test_bytes_of_a_token():
    """2 bits for each number of key and value, and two float32 scales, of 2 layers and 2 kv heads."""
    (group,) = layer_groups(engines.model_of("llama", "float64"), "int2")
    assert group.lossy
    assert group.token_bytes() == 2 * 2 * (2 * 8 // 4 + 2 * 4)


def test_what_is_not_served_is_refused():
    with pytest.raises(ValueError, match="needs prefix_cache = False"):
        EngineConfig(retention="every_other_token")
    with pytest.raises(ValueError, match=r"retention = 'nothing'; legal: None, or .* 'every_other_token'\)"):
        engines.build(dataclasses.replace(engines.ENGINES["one after the other"], retention="nothing"))
    with pytest.raises(ValueError, match="every layer has a sliding window"):
        engines.build(config("one after the other", retention="every_other_token"), "mistral")
    with pytest.raises(ValueError, match="batch_invariant does not go with retention"):
        config("invariant", retention="every_other_token")
    with pytest.raises(ShardingError, match="a retention rule does not go with context=2"):
        meshes.over("context=2", "llama", config("tight, swap", retention="every_other_token"))
    with pytest.raises(ValueError, match=r"kv_dtype = 'int3'; legal: \('auto', 'bfloat16', .*'kivi2', .*'int2'\)"):
        EngineConfig(kv_dtype="int3")


@pytest.mark.parametrize(
    ("module", "table", "word"),
    [
        (int2_kv_format, "KV_FORMATS", "(?<![a-z_])int2"),
        (every_other_token, "RETENTION_RULES", "every.?other.?token"),
    ],
)
def test_each_is_one_file_and_one_row(module, table, word):
    """One file defines it, its one row is in one table, and no file of the packages knows its name."""
    path = Path(module.__file__)
    assigned = [node.targets[0] for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assign)]
    assert [ast.unparse(place.value) for place in assigned if isinstance(place, ast.Subscript)] == [table]
    listed = ["jaxllm", "pallas_kernels", "sharding", "recipes", "tests/seams"]
    found = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *listed], cwd=environment.ROOT, capture_output=True, text=True
    ).stdout.split()
    knows = [
        name for name in found
        if name.endswith(".py") and not Path(name).name.startswith("test_")
        and not name.startswith(("jaxllm/train/outer/", "jaxllm/quant/"))  # messages and weights have an int2 too
        and re.search(word, (environment.ROOT / name).read_text(encoding="utf-8"), re.IGNORECASE)
    ]  # fmt: skip
    assert knows == [str(path.relative_to(environment.ROOT))]
