"""``jaxllm quantise``: rounds a model's matrices to integers of few bits and writes it as other libraries read it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jaxllm.cli.command_parser import parse_command
from jaxllm.cli.commands.convert import ends_on_sigterm
from jaxllm.cli.errors import UsageError
from jaxllm.cli.model_loading import progress_bar


def quantise(argv: list[str]) -> int:
    """Round a model's matrices to few bits: `jaxllm quantise SOURCE OUT --format int4_g128`."""

    def run(
        source: Annotated[str, tyro.conf.Positional],
        out: Annotated[Path, tyro.conf.Positional],
        /,
        format: str = "int4_g128",
        method: str = "gptq",
        calibrate: tuple[Path, ...] = (),
        rows: int = 64,
        length: int = 512,
        layout: str = "compressed-tensors",
        bits_budget: float = 0,
        only: Literal["experts"] | None = None,
        evaluate: tuple[Path, ...] = (),
    ) -> int:
        """Rounds the matrices of a model's blocks, a block at a time, and writes it as other libraries read it.

        transformers opens the result, and so does every command here. Embeddings, norms, routers and the head
        stay as they are. A run that was stopped goes on when the same command is given again.

        Args:
            source: a directory with config.json and safetensors, a .gguf file, smollm2 or hf:ORG/NAME. Convert a run's
                directory first, with jaxllm convert.
            out: directory to create.
            format: int4_g128: integers of 4 bits, with a scale for every 128 inputs. Bits are 2 to 8; without _g, a
                row of a matrix has one scale; _asym and _sym choose codes with and without zero points. fp8: float8
                e4m3 with a scale for every row; mxfp4: e2m1 with a power of two for every 32 inputs. lut4, lut3:
                levels of NormalFloat in 4 or 3 bits with learned scales, of 64 inputs or as _g says; nf4: with scales
                from the largest magnitude. w8a8, w4a8_g128: integers of 8 or 4 bits whose matmuls round activations to
                int8; llm_int8: w8a8 whose outlier inputs stay in the compute dtype. ternary: -1, 0 and 1 times the
                largest magnitude of a row; with --only experts they are served in less than a bit
                (--weights experts_ternary).
            method: rtn (rounds to the nearest), hqq, gptq, gptq_act_order, gptq_learned_scales, learned_scales, awq,
                smoothquant or smoothquant_bias. The first two need no text.
            calibrate: text files whose tokens go through the model.
            rows: rows of that text at most.
            length: tokens of a row.
            layout: compressed-tensors, gptq or awq: how the files have the codes.
            bits_budget: mean of bits over weights, in place of the bits of --format: layers have 2 to 8 bits, more
                where these lower the error most. The text goes through the model twice.
            only: experts: the matrices of a mixture's experts, and nothing else; they lose least from few bits.
            evaluate: text files; the loss on their first rows is printed, before and after. They should not be those
                of --calibrate.
        """
        from jaxllm.convert.quantise import QuantiseConfig
        from jaxllm.convert.quantise import quantise as quantise_model
        from jaxllm.hub.model_source import find_model, open_source
        from jaxllm.quant.formats.format_names import parse_format
        from jaxllm.quant.input_statistics import CalibrationError
        from jaxllm.quant.methods.rounding_table import METHODS

        try:
            form = parse_format(format)
        except ValueError as error:
            raise UsageError(f"--format: {error}") from error
        config = QuantiseConfig(
            method,
            form.bits,
            form.group,
            form.symmetric,
            rows,
            length,
            form.codebook,
            layout,
            form.activations,
            bits_budget,
            only or "",
        )
        if METHODS[method].calibrates and not calibrate:
            raise UsageError(f"--method {method} wants text: give files with --calibrate, or choose rtn or hqq.")
        path = find_model(source)
        if (path / "checkpoints").is_dir():
            raise UsageError(f"{path} is a run; convert it first: jaxllm convert {path} OUT --to hf.")
        model = open_source(path)
        texts = [file.read_text() for file in calibrate]
        ids = [int(token) for text in texts for token in model.tokenizer.encode(text)] if texts else []
        try:
            with ends_on_sigterm(), progress_bar("quantising", source) as progress:
                made = quantise_model(model, out, config, ids, progress)
        except CalibrationError as error:
            raise UsageError(str(error)) from error
        print(table(made.matrices))
        if evaluate:
            ids = [int(token) for file in evaluate for token in model.tokenizer.encode(file.read_text())]
            before, after = (
                mean_loss(name, ids, rows, length, weights)
                for name, weights in ((path, "plain"), (out, "packed" if form.activations else "plain"))
            )
            print(f"loss on {', '.join(map(str, evaluate))}: {before:.4f} -> {after:.4f} ({after / before - 1:+.2%})")
        print(f"{out}: {made.bytes_before / 2**20:,.1f} -> {made.bytes_after / 2**20:,.1f} MiB")
        return 0

    return parse_command(run, argv, "jaxllm quantise")


def mean_loss(source: Path, ids: list[int], rows: int, length: int, weights: str = "plain") -> float:
    """Mean loss of a model on rows of tokens, with the training forward, a row at a time.

    Args:
        weights: see ``load_model``; activations are rounded where they are packed.

    Raises:
        UsageError: the text is shorter than a row.
    """
    import jax
    import jax.numpy as jnp

    from jaxllm.convert.load import load_model
    from jaxllm.models.attention_context import Segments
    from jaxllm.quant.input_statistics import CalibrationError, calibration_rows

    try:
        tokens = calibration_rows(ids, rows, length)
    except CalibrationError as error:
        raise UsageError(f"--evaluate: {error}") from error
    loaded = load_model(source, weights=weights)

    @jax.jit
    def loss(params: Any, row: Any) -> Any:
        hidden, _ = loaded.model.forward(params, row[None], jnp.arange(length)[None], Segments())
        scores = jax.nn.log_softmax(loaded.model.head(params, hidden[:, :-1])[0])
        return -jnp.mean(jnp.take_along_axis(scores, row[1:, None], axis=1))

    with jax.set_mesh(loaded.mesh):
        return float(sum(float(loss(loaded.params, row)) for row in tokens) / len(tokens))


def table(matrices: list) -> str:
    """Errors by kind of matrix: mean over layers, beside rounding to the nearest, and the worst layer.

    Bits of every layer, where they are not all the same.
    """
    kinds: dict[str, list] = {}
    for one in matrices:
        kinds.setdefault(re.sub(r"^segments/\d+/\d+/|\[\d+\]$", "", one.name), []).append(one)
    lines = [f"{'matrix':24} {'error':>10} {'to nearest':>11} {'worst layer':>12}"]
    for kind, ones in kinds.items():
        mean = [sum(values) / len(ones) for values in ([o.error for o in ones], [o.nearest for o in ones])]
        lines.append(f"{kind:24} {mean[0]:>10.2e} {mean[1]:>11.2e} {max(o.error for o in ones):>12.2e}")
    if len({one.bits for one in matrices}) > 1:
        lines.append("bits by layer")
        lines += [f"{kind:24} {' '.join(str(one.bits) for one in ones)}" for kind, ones in kinds.items()]
    remarks = {f"{one.name}: {one.remark}" for one in matrices if one.remark}
    return "\n".join([*lines, *sorted(remarks)])
