"""Mutants of the optim room."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "persistent_state_of_the_layer_before",
        "jaxllm/optim/streamed_state.py",
        "joined(layer_row(fixed, number), here)",
        "joined(layer_row(fixed, jnp.maximum(number - 1, 0)), here)",
        ("tests/train/test_host.py::test_a_run_is_the_same",),
    ),
    Mutant(
        "adafactor_decay_swapped",
        "jaxllm/optim/adafactor.py",
        "return now * old + (1 - now) * square",
        "return (1 - now) * old + now * square",
        ("tests/optim/test_kinds.py::test_adafactor",),
    ),
    Mutant(
        "adafactor_normalises_by_the_other_side",
        "jaxllm/optim/adafactor.py",
        "share = by_row / mean(by_row, found.rows)",
        "share = by_row / mean(by_row, found.columns)",
        ("tests/optim/test_kinds.py::test_adafactor",),
    ),
    Mutant(
        "soap_without_bias_correction",
        "jaxllm/optim/soap.py",
        " / (1 - b1**steps) / (jnp.sqrt(",
        " / (jnp.sqrt(",
        ("tests/optim/test_kinds.py::test_soap",),
    ),
    Mutant(
        "soap_refreshes_a_step_late",
        "jaxllm/optim/soap.py",
        "jnp.where(count % refresh == 0, 1, 0)",
        "jnp.where(count % refresh == 1, 1, 0)",
        ("tests/optim/test_kinds.py::test_soap",),
    ),
    Mutant(
        "sophia_without_gamma",
        "jaxllm/optim/sophia.py",
        "jnp.clip(m / jnp.maximum(GAMMA * h, eps), -1, 1)",
        "jnp.clip(m / jnp.maximum(h, eps), -1, 1)",
        ("tests/optim/test_kinds.py::test_sophia",),
    ),
    Mutant(
        "gradient_point_nearer_to_the_iterates",
        "jaxllm/optim/schedule_free.py",
        "x if z is None else b1 * x + (1 - b1) * z",
        "x if z is None else (1 - b1) * x + b1 * z",
        ("tests/optim/test_kinds.py::test_schedule_free",),
    ),
    Mutant(
        "schedule_free_weights_by_the_rate",
        "jaxllm/optim/schedule_free.py",
        "share, steps = now**2 / weights, state.count + 1",
        "share, steps = now / weights, state.count + 1",
        ("tests/optim/test_kinds.py::test_schedule_free",),
    ),
    Mutant(
        "muon_sized_by_the_smaller_side",
        "jaxllm/optim/muon.py",
        "                max(math.prod(",
        "                min(math.prod(",
        ("tests/optim/test_kinds.py::test_muon_has_nesterov_momentum",),
    ),
    Mutant(
        "eight_bit_scale_of_the_largest_value",
        "jaxllm/optim/adam8bit.py",
        "scales = jnp.max(jnp.abs(parts), axis=dim + 1)",
        "scales = jnp.max(parts, axis=dim + 1)",
        ("tests/optim/test_blockwise.py::test_errors_are_half_a_part",),
    ),
    Mutant(
        "everything_decays",
        "jaxllm/optim/matrix_params.py",
        "lambda found: found is not None, logical_axes)",
        "lambda found: True, logical_axes)",
        ("tests/optim/test_adamw.py::test_matrices_and_embeddings_decay_and_nothing_else",),
    ),
    Mutant(
        "first_step_has_no_rate",
        "jaxllm/optim/schedules.py",
        "rising = config.peak * (step + 1) / max(warmup, 1)",
        "rising = config.peak * step / max(warmup, 1)",
        ("tests/optim/test_schedules.py::test_warmup_rises_linearly_and_step_zero_learns",),
    ),
    Mutant(
        "cosine_falls_to_zero",
        "jaxllm/optim/schedules.py",
        "after = floor + (config.peak - floor) * 0.5",
        "after = (config.peak - floor) * 0.5",
        ("tests/optim/test_schedules.py::test_cosine_falls_from_peak_to_floor",),
    ),
    Mutant(
        "wsd_decays_a_step_late",
        "jaxllm/optim/schedules.py",
        "jnp.clip((step - (total_steps - decay)) / decay, 0, 1)",
        "jnp.clip((step - 1 - (total_steps - decay)) / decay, 0, 1)",
        ("tests/optim/test_schedules.py::test_wsd_is_flat_then_falls_linearly",),
    ),
]
