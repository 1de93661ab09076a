"""Names of formats: every base, its options in any order, and what is refused."""

from __future__ import annotations

import pytest

from jaxllm.cli.commands.quantise import quantise as command
from jaxllm.cli.errors import UsageError
from jaxllm.convert.quantise_config import CODEBOOK_BITS, QuantiseConfig
from jaxllm.quant.formats.format_names import BASES, FormatName, parse_format

NAMES = {
    "int4_g128": FormatName(4, 128, None, "", ""),
    "int3_asym_g64": FormatName(3, 64, False, "", ""),
    "int2_g16_sym": FormatName(2, 16, True, "", ""),
    "int8": FormatName(8, 0, None, "", ""),
    "lut3": FormatName(3, 64, None, "lut3", ""),
    "nf4_g32": FormatName(4, 32, None, "nf4", ""),
    "fp8": FormatName(8, 0, None, "fp8", ""),
    "mxfp4": FormatName(4, 0, None, "mxfp4", ""),
    "w4a8_g128": FormatName(4, 128, None, "", "int8"),
    "w8a8": FormatName(8, 0, None, "", "int8"),
    "llm_int8": FormatName(8, 0, None, "", "outliers"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_its_fields(name):
    assert parse_format(name) == NAMES[name]


def test_every_base_makes_a_config():
    for name, base in BASES.items():
        form = parse_format(name)
        config = QuantiseConfig(
            "rtn", form.bits, form.group, None, codebook=form.codebook, activations=form.activations
        )
        assert config.grid("float32").bits == base.bits
        assert not base.codebook or CODEBOOK_BITS[base.codebook] == base.bits


@pytest.mark.parametrize(
    ("name", "says"),
    [("int9", "format 'int9': give one of int2, .*Did you mean"), ("int4g128", "give one of"), ("", "give one of"),
     ("int4_g0", "_g0 is none of _g and a number"), ("int4_g", "_g is none of"), ("int4_", "_ is none of"),
     ("int4_128", "_128 is none of"), ("fp8_g64", "fp8 takes no option, each once, and not _g64"),
     ("lut4_asym", "lut4 takes _gN, each once, and not _asym"), ("int4_g8_g16", "_gN and _asym or _sym, each once"),
     ("int4_sym_asym", "each once"), ("w8a8_sym", "w8a8 takes _gN"), ("INT4", "give one of")],
)  # fmt: skip
def test_what_is_wrong_is_named(name, says):
    with pytest.raises(ValueError, match=says):
        parse_format(name)


def test_the_command_says_so(tmp_path):
    with pytest.raises(UsageError, match="--format: format 'int4_g0': _g0 is none of"):
        command([str(tmp_path), str(tmp_path / "out"), "--format", "int4_g0", "--method", "rtn"])
