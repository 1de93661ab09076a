"""Bytes of optimizer state, in compiled programs and against their papers' formulas."""

from __future__ import annotations

import jax

from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig, functional
from jaxllm.optim import optimizer
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import step_on
from sharding.topology import Topology
from tests import tiny
from tests.optim.kinds import WHOLE, arrays_bytes, named, table_bytes
from tests.proofs.harness import proof

LLAMAS = {
    "60M": (512, 1376, 8, 8, 128),
    "130M": (768, 2048, 12, 12, 256),
    "350M": (1024, 2736, 24, 16, 256),
    "1B": (2048, 5461, 24, 32, 512),
    "7B": (4096, 11008, 32, 32, 1024),
}
"""Width, feed-forward width, layers, heads, rank: both papers' models (GaLore's table 11, section 5.1)."""


@proof("optimizers", cases=WHOLE, sample=2, bound=0.0)
def compiled_state(name: str) -> float:
    """Argument bytes of the compiled step beside parameters and batch equal the documentation's table exactly.

    But for scalars, and Muon's fifteen coefficients.
    """
    config = tiny.decoder(dtype="float32", embed_dim=64, mlp=96, layers=3, remat="full")
    run = RunConfig(model=config, optim=named(name), steps=10, data=DataConfig(batch_size=2, seq_len=8), mesh="dp")
    step, (state, batch), mesh = step_on(Topology.parse("cpu:1"), run)
    with jax.set_mesh(mesh):
        compiled = step.lower(state, batch).compile()
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))  # noqa: E731
    model = functional(config, run.parallel.rules())
    others = size((state.params, batch, state.step)) + 8  # the key's two words
    small = size(state.opt_state) - arrays_bytes(state.opt_state)
    found = compiled.memory_analysis().argument_size_in_bytes - others - small
    return abs(found - table_bytes(name, model.abstract(), model.logical_axes()))


@proof(
    "optimizers",
    cases=[(kind, size) for kind in ("galore", "apollo", "apollo_mini") for size in LLAMAS],
    sample=3,
    bound=0.05,
)
def formula_of_the_paper(case: tuple[str, str]) -> float:
    """State of matrices: 2 n r + m r of GaLore, 2 n r + 2 of APOLLO, 2 n + 2 of Mini (arXiv:2412.05270, table 1)."""
    kind, size = case
    width, hidden, layers, heads, rank = LLAMAS[size]
    block = BlockConfig(AttentionConfig(heads, heads, width // heads), MlpConfig(hidden))
    config = DecoderConfig(vocab_size=32000, embed_dim=width, layers=layers, pattern=(block,), tied=False)
    model = functional(config)
    more = {} if kind == "apollo_mini" else {"rank": rank}
    state = jax.eval_shape(optimizer(named(kind, **more), 10, model.logical_axes()).init, model.abstract())
    found = arrays_bytes(state[1].inner_states["matrices"])
    shapes = [(width, width)] * 4 + [(width, hidden)] * 3
    each = {
        "galore": lambda m, n: 2 * n * rank + m * rank,
        "apollo": lambda m, n: 2 * n * rank + 2,
        "apollo_mini": lambda m, n: 2 * n + 2,
    }[kind]
    want = 4 * layers * sum(each(min(s), max(s)) for s in shapes)
    return abs(found / want - 1)
