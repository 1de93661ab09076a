"""Mutants of the hub room."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "q4_0_centred_elsewhere",
        "jaxllm/hub/gguf/ggml_formats.py",
        "    out -= 8\n",
        "    out -= 7\n",
        ("tests/hub/test_ggml.py::test_random_blocks_decode_to_the_same_bits",),
    ),
    Mutant(
        "q4_k_minima_added",
        "jaxllm/hub/gguf/ggml_formats.py",
        (
            '    _nibbles(b["q"].reshape(-1, 4, 32), out.reshape(-1, 4, 2, 32))\n'
            "    parts = out.reshape(-1, 8, 32)\n"
            '    parts *= (_float(b["d"]) * scales)[:, :, None]\n'
            "    parts -= "
        ),
        (
            '    _nibbles(b["q"].reshape(-1, 4, 32), out.reshape(-1, 4, 2, 32))\n'
            "    parts = out.reshape(-1, 8, 32)\n"
            '    parts *= (_float(b["d"]) * scales)[:, :, None]\n'
            "    parts += "
        ),
        ("tests/hub/test_ggml.py::test_random_blocks_decode_to_the_same_bits",),
    ),
    Mutant(
        "nibbles_high_first",
        "jaxllm/hub/gguf/ggml_formats.py",
        ("    out[..., 0, :] = q & 15\n    out[..., 1, :] = q >> 4\n"),
        ("    out[..., 1, :] = q & 15\n    out[..., 0, :] = q >> 4\n"),
        ("tests/hub/test_ggml.py::test_random_blocks_decode_to_the_same_bits",),
    ),
    Mutant(
        "fp8_scales_divide",
        "jaxllm/hub/quantised_checkpoints.py",
        "np.asarray(tensor[index]).astype(np.float32) * scales",
        "np.asarray(tensor[index]).astype(np.float32) / scales",
        (
            "tests/hub/test_quantised.py::test_blocks_are_what_another_decoder_says",
            "tests/hub/test_quantised.py::test_float8_blocks_become_plain_numbers",
        ),
    ),
    Mutant(
        "mxfp4_high_nibble_first",
        "jaxllm/hub/quantised_checkpoints.py",
        "np.stack([E2M1[blocks & 15], E2M1[blocks >> 4]], axis=-1)",
        "np.stack([E2M1[blocks >> 4], E2M1[blocks & 15]], axis=-1)",
        ("tests/hub/test_quantised.py::test_blocks_are_what_another_decoder_says",),
    ),
    Mutant(
        "longrope_magnitude_without_its_root",
        "jaxllm/hub/families/rope_fields.py",
        "math.sqrt(1 + math.log(factor) / math.log(length))",
        "(1 + math.log(factor) / math.log(length))",
        ("tests/hub/test_peer_parts.py::test_longrope_changes_beyond_the_original_length",),
    ),
    Mutant(
        "older_rope_fields_are_ignored",
        "jaxllm/hub/families/rope_fields.py",
        "    given = older or newer or {}\n",
        "    given = newer or older or {}\n",
        ("tests/hub/test_peer_parts.py::test_of_two_scalings_the_one_of_transformers_counts",),
    ),
]
