"""Mutants of the quant room."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "mxfp4_scale_one_exponent_higher",
        "jaxllm/quant/formats/mxfp4.py",
        "exponent - 1 - LARGEST_EXPONENT + BIAS",
        "exponent - LARGEST_EXPONENT + BIAS",
        ("tests/quant/test_formats.py::test_formats_round_to_the_nearest",),
    ),
    Mutant(
        "mxfp4_steps_change_above_two",
        "jaxllm/models/fp4_arithmetic.py",
        "jnp.where(magnitude < 2, 0.5,",
        "jnp.where(magnitude < 3, 0.5,",
        ("tests/quant/test_formats.py::test_formats_round_to_the_nearest",),
    ),
    Mutant(
        "mxfp4_high_nibble_is_the_first",
        "jaxllm/quant/formats/mxfp4.py",
        "codes[..., 0::2] | (codes[..., 1::2] << 4)",
        "codes[..., 1::2] | (codes[..., 0::2] << 4)",
        ("tests/quant/test_formats.py::test_formats_round_to_the_nearest",),
    ),
    Mutant(
        "float8_blocks_share_one_scale",
        "jaxllm/quant/formats/block_float8.py",
        "largest = jnp.max(jnp.abs(tiles), axis=(-3, -1))",
        "largest = jnp.broadcast_to(jnp.max(jnp.abs(tiles)), (*lead, down, across))",
        ("tests/quant/test_formats.py::test_formats_round_to_the_nearest",),
    ),
    Mutant(
        "lanes_of_inputs_are_neighbours",
        "jaxllm/quant/formats/code_groups.py",
        "(x[..., k :: len(lanes)], lane.reshape",
        "(x[..., k * (x.shape[-1] // len(lanes)) :][..., : x.shape[-1] // len(lanes)], lane.reshape",
        ("tests/quant/test_code_groups.py::test_a_matmul_with_packed_codes_is_that_of_the_dense_weight",),
    ),
    Mutant(
        "middle_code_without_the_zero_point",
        "jaxllm/quant/grids.py",
        "(2 ** (self.bits - 1) - params.zero) * params.scale",
        "params.zero * params.scale",
        ("tests/quant/test_code_groups.py::test_a_matmul_with_packed_codes_is_that_of_the_dense_weight",),
    ),
    Mutant(
        "gptq_zero_points_as_they_are",
        "jaxllm/hub/gptq_awq.py",
        'less_one = not awq and kind == "gptq"',
        "less_one = False",
        ("tests/hub/test_stored_codes.py::test_files_of_gptq_and_awq",),
    ),
    Mutant(
        "awq_nibbles_in_order",
        "jaxllm/hub/gptq_awq.py",
        "nibbles[..., np.argsort(ORDER)]",
        "nibbles[..., ORDER]",
        ("tests/hub/test_stored_codes.py::test_files_of_gptq_and_awq",),
    ),
    Mutant(
        "k_quants_minima_added",
        "jaxllm/quant/formats/k_quants.py",
        "of_groups(-number(2)",
        "of_groups(number(2)",
        ("tests/hub/test_stored_codes.py::test_blocks_of_gguf_stay_packed",),
    ),
]
