"""Cost model of programs: tokens of StableHLO, and a model trained on costs that the text determines."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cli.main import main
from jaxllm.tune import program_cost
from jaxllm.tune.program_cost import ProgramExample


def product(m: int, k: int, n: int) -> ProgramExample:
    """StableHLO of a matmul, with its FLOPs and bytes by formula."""
    text = jax.jit(jnp.dot).lower(jnp.zeros((m, k)), jnp.zeros((k, n))).as_text()
    flops, moved = 2.0 * m * k * n, 4.0 * (m * k + k * n + m * n)
    return ProgramExample(text, {"flops": flops, "bytes": moved, "seconds": flops / 1e10})


def test_tokens_are_names_and_dimensions():
    found, other = (program_cost.tokenize(product(8, 24, n).text) for n in (40, 41))
    assert len(found.names) == 1, "one operation: one line"
    assert {round(2 ** (8 * float(x)) - 1) for x in found.numbers[found.places > 0]} >= {8, 24, 40}
    assert np.array_equal(found.names, other.names)
    assert not np.array_equal(found.numbers, other.numbers)


def test_a_program_is_the_sum_of_its_operations():
    """Where neighbours say nothing, the same operation twice costs twice as much."""
    params = program_cost.init_model(jax.random.key(0))
    params |= {name: jnp.zeros_like(params[name]) for name in ("mix_a", "mix_b")}
    one = program_cost.tokenize(product(8, 24, 40).text)
    two = program_cost.Tokens(*(np.concatenate([x, x]) for x in one))
    logs = program_cost.predict_logs(params, program_cost.stack_programs([one, two]))
    np.testing.assert_allclose(logs[1] - logs[0], np.log(2), rtol=1e-5)


@pytest.mark.drawn(1)
def test_the_model_learns_costs_that_the_text_determines(rng):
    sizes = rng.choice((16, 32, 48, 64, 96, 128, 192, 256, 384, 512), (100, 3))
    model, error = program_cost.train_and_test([product(*map(int, one)) for one in sizes], 300)
    assert all(error[name].r_squared > 0.8 for name in program_cost.TARGETS)
    [small], [large] = (model.predict([product(n, n, n).text]) for n in (32, 256))
    assert 30 * small["flops"] < large["flops"]


def test_files_without_a_program_are_refused(tmp_path, capsys):
    file = tmp_path / "notes.txt"
    file.write_text("nothing")
    with pytest.raises(ValueError, match=r"no StableHLO; give the text"):
        program_cost.read_program(file)
    assert main(["tune", "program", "--programs", "4"]) != 0
    assert "--programs of 16 or more" in capsys.readouterr().err
