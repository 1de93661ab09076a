"""``jaxllm roofline``: FLOPs, bytes and bound (compute or memory) of each operation of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxllm.cli.command_parser import check_outputs, parse_command
from jaxllm.cli.recipe_arguments import configure, find_recipe, split_settings

VALUES = ("--on", "--phase", "--batch", "--seq", "--weights", "--kv-dtype", "--hardware", "--save", "--html")


def roofline(argv: list[str]) -> int:
    """Show what bounds each operation: `jaxllm roofline RECIPE --on v6e:2x4`."""

    def run(
        recipe: Annotated[str, tyro.conf.Positional],
        /,
        on: str,
        phase: Literal["all", "training", "prefill", "decode"] = "all",
        batch: int | None = None,
        seq: int | None = None,
        weights: str = "bfloat16",
        kv_dtype: Literal["auto", "bfloat16", "int8", "fp8", "int4", "bfp4"] = "auto",
        hardware: Path | None = None,
        save: Path | None = None,
        html: Path | None = None,
    ) -> int:
        """Prints FLOPs, bytes, arithmetic intensity, time, bound and memory per operation, for a phase or all three.

        Computed by formula for work divided evenly over the devices, without communication. Any setting of the run can
        follow, as for `jaxllm train`: --model.layers, --model.dtype, ...

        Args:
            recipe: name of the recipe, or FILE.py:FUNCTION.
            on: topology, such as v6e:2x4 or h100:1x8.
            phase: training, prefill or decode; all three by default.
            batch: global batch size; by default the recipe's for training, else 64.
            seq: sequence length in tokens, for decode the context length; the recipe's by default.
            weights: format of the matrices in prefill and decode: bfloat16 (the compute dtype), int8, int4, nf4,
                lut4, lut3, mxfp4.
            kv_dtype: format of the KV cache.
            hardware: TOML or JSON file that changes or adds kinds of hardware.
            save: JSON file to write the results to.
            html: page to write for one phase, with the roofline drawn.
        """
        from dataclasses import asdict

        from jaxllm.cli.errors import UsageError
        from jaxllm.files import write_json
        from jaxllm.observe.html_report import write
        from jaxllm.plan import hardware as known
        from jaxllm.plan.formulas import op_roofline as formulas

        if html is not None and phase == "all":
            raise UsageError("--html shows one phase: give --phase training, prefill or decode.")
        check_outputs(save=save, html=html)
        config = configure(find_recipe(recipe), settings, prog=f"jaxllm roofline {recipe}")
        table = known.TABLE if hardware is None else known.read(hardware)
        cluster = known.Cluster.parse(on, table)
        length, found = seq or config.data.seq_len, {}
        for one in formulas.PHASES if phase == "all" else (phase,):
            rows = batch or (config.data.batch_size if one == "training" else 64)
            ops = formulas.roofline(
                config.model, one, batch=rows, seq_len=length, hardware=cluster.hardware, devices=cluster.devices,
                **({} if one == "training" and phase == "all" else {"weights": weights, "kv_dtype": kv_dtype}),
            )  # fmt: skip
            found[one] = [asdict(op) for op in ops]
            what = "one token after" if one == "decode" else "of"
            ridge = cluster.hardware.flops / cluster.hardware.bandwidth
            title = (
                f"{config.name}, {one}: {rows} rows, {what} {length:,} tokens; each of {cluster.devices} x "
                f"{cluster.hardware.name}, whose ridge is at {ridge:.0f} FLOP/byte"
            )
            print(("\n" if len(found) > 1 else "") + formulas.table(ops, title))
            if html is not None:
                write(formulas.html_report(ops, title, cluster.hardware), html)
                print(f"saved: {html}")
        if save is not None:
            write_json(save, found)
            print(f"saved: {save}")
        return 0

    values, settings = split_settings(argv, VALUES, ("--help", "-h"))
    return parse_command(run, values, "jaxllm roofline")
