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
]
