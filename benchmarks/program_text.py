"""Texts of programs, normalised: two are equal if the programs are, whatever things in the source are called.

Left out or numbered is what renaming and moving functions, modules, fields of trees and lines changes, and what
``jax.named_scope`` adds:

- metadata, locations, tables of files, the module's name and the names of arguments and results are left out;
- functions, computations and instructions have numbers, instructions those of their computation alone;
- a kernel (Mosaic's or Triton's bytecode in a custom call) is decoded and printed without locations and without markers
  of traces, its functions numbered. It stands at the end of the text once, and where it is called there is its hash.

Opcodes, shapes, layouts, operands, attributes, constants, the order of instructions and backend configurations stay.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections import defaultdict

_QUOTED = r'"(?:[^"\\]|\\.)*"'
_NESTED = rf'\{{(?:[^{{}}"]|{_QUOTED}|\{{(?:[^{{}}"]|{_QUOTED}|\{{(?:[^{{}}"]|{_QUOTED})*\}})*\}})*\}}'
_DROPPED = re.compile(rf", (?:metadata|origin)={_NESTED}")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|select|scatter|true_computation|false_computation|branch_computations"
    r"|called_computations)=(\{[^}]*\}|%[\w.\-]+)"
)
_NAMED = re.compile(rf"({_QUOTED})|%([\w.\-]+)")
_MOSAIC = re.compile(r'(body(?:"|\\22): ?(?:"|\\22))([A-Za-z0-9+/=]+)')
_TRITON = re.compile(rf"\bir = ({_QUOTED}), name = {_QUOTED}")


def normal_hlo(text: str) -> str:
    """The text of HLO modules, normalised."""
    text, kernels = with_kernels_apart(text)
    out: list[str] = []
    computations: dict[str, int] = defaultdict(itertools.count().__next__)
    instructions: dict[str, int] = {}
    tables = False

    def called(found: re.Match[str]) -> str:
        return f"{found[1]}=" + re.sub(r"%([\w.\-]+)", lambda name: f"@{computations[name[1]]}", found[2])

    def named(found: re.Match[str]) -> str:
        return found[1] or f"%{instructions[found[2]]}"

    for line in text.splitlines():
        if line.startswith("HloModule "):
            line = re.sub(r'fingerprint_before_lhs="\w*"', "", re.sub(r"^HloModule [^,]*", "HloModule", line))
        elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            tables = True
        elif head := re.match(r"(ENTRY )?%?([\w.\-]+) (\(.*\{)$", line):
            tables, instructions = False, defaultdict(itertools.count().__next__)
            signature = re.sub(r"([(,] ?)[\w.\-]+: ", r"\1", head[3])
            line = f"{head[1] or ''}@{computations[head[2]]} {signature}"
        elif line.startswith(" "):
            line = _NAMED.sub(named, _CALLED.sub(called, _DROPPED.sub("", line)))
        if line and not tables:
            out.append(line)
    return "\n".join([*out, *kernels, ""])


def normal_stablehlo(text: str) -> str:
    """The text of a StableHLO module, normalised."""
    text, kernels = with_kernels_apart(text)
    names = re.findall(r"func\.func (?:public |private )?@([\w.\-]+)", text)
    numbers = {name: f"@{i}" for i, name in enumerate(names)}
    text = re.sub(r"^module @[\w.\-]+", "module", text)
    text = re.sub(rf"(?:jax\.result_info|jax\.arg_info|kernel_name) = {_QUOTED}(?:, )?", "", text)
    return "\n".join([re.sub(r"@([\w.\-]+)", lambda name: numbers.get(name[1], name[0]), text), *kernels, ""])


def with_kernels_apart(text: str) -> tuple[str, list[str]]:
    """The text with a hash in the place of each kernel, and the kernels' own texts."""
    kernels: dict[str, str] = {}

    def kept(code: bytes) -> str:
        own = kernel(code)
        kernels.setdefault(digest(own), own)
        return digest(own)

    text = _MOSAIC.sub(lambda found: found[1] + kept(base64.b64decode(found[2])), text)
    text = _TRITON.sub(lambda found: f"ir = {kept(unescaped(found[1][1:-1]))}", text)
    return text, [f"kernel {name}\n{own}" for name, own in kernels.items()]


def unescaped(text: str) -> bytes:
    r"""What MLIR prints as \XX or \\."""
    return re.sub(
        rb"\\([0-9A-F]{2}|\\)", lambda x: x[1] if x[1] == b"\\" else bytes.fromhex(x[1].decode()), text.encode()
    )


def kernel(code: bytes) -> str:
    """The text of a kernel's bytecode without locations, its functions numbered."""
    from jax._src.lib import tpu, triton
    from jax.interpreters import mlir
    from jaxlib.mlir import ir

    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    tpu.register_dialect(context)
    triton.dialect.register_dialect(context)
    with context:
        text = ir.Module.parse(code).operation.get_asm(enable_debug_info=False)
    numbers: dict[str, int] = defaultdict(itertools.count().__next__)
    text = re.sub(r'(?m)^ *"stable_mosaic\.tpu\.trace_(?:start|stop)".*\n', "", text)
    text = re.sub(r"^module @[\w.\-]+", "module", text)
    text = re.sub(r'sym_name = "([^"]*)"', lambda name: f"sym_name = @{name[1]}", text)
    return re.sub(r"@([\w.\-]+)", lambda name: f"@{numbers[name[1]]}", text)


def digest(text: str) -> str:
    """Its SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()
