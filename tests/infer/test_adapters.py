"""Many adapters over one base: rows of each are as that adapter alone; slots, pages and revisions keep their books."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.infer import SamplingParams
from tests.infer import adapters, engines
from tests.infer.adapters import RANKS, check_slots, drawn, merged

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, ignore_eos=True)


def test_a_mixed_batch_is_each_adapter_alone(rng, float64):
    """Six adapters of ranks 4 to 64 and the base share steps over three slots, so some wait and some are evicted."""
    engine = engines.build(adapters.SIZES, "llama", "float64")
    for n, rank in enumerate(RANKS):
        engine.load_adapter(f"a{n}", drawn("llama", n, rank))
    prompt = rng.integers(0, engines.VOCAB, 11).tolist()
    asked = [(n, engine.submit([*prompt, i], GREEDY, adapter=None if n is None else f"a{n}"))
             for i, n in enumerate([*range(len(RANKS)), None, 2, 0])]  # fmt: skip
    while engine.busy:
        engine.step()
        engines.check_books(engine)
        check_slots(engine)
    for n, request in asked:
        params = engines.params_of("llama", "float64") if n is None else merged("llama", "float64", n, RANKS[n])
        assert adapters.error("llama", "float64", request, params) < 1e-10
    assert engine.runner.program_cache.counts.late == 0
    assert engine.adapter_slots.evictions >= 3
    with pytest.raises(ValueError, match="there is no adapter 'a9'"):
        engine.submit(prompt, GREEDY, adapter="a9")
    assert np.isfinite(engine.adapter_slots.scales).all()
