"""``jaxllm tune``: block sizes of kernels, tiles of a matmul and costs of programs, by learned cost models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxllm.cli.command_parser import check_outputs, parse_command
from jaxllm.cli.errors import UsageError


def tune(argv: list[str]) -> int:
    """Tune kernels with learned cost models: `jaxllm tune flash_attention|matmul|program`."""
    others = {"matmul": tune_matmul, "program": tune_program}
    return others[argv[0]](argv[1:]) if argv and argv[0] in others else tune_kernel(argv)


def tune_kernel(argv: list[str]) -> int:
    """Search the block sizes of a kernel and store the fastest: `jaxllm tune flash_attention --on v5e:1x1`."""

    def run(
        operation: Annotated[Literal["flash_attention", "grouped_matmul", "recurrent"], tyro.conf.Positional],
        /,
        on: str | None = None,
        trials: int = 24,
        seed: int = 0,
        store: bool = True,
    ) -> int:
        """Measures some of the legal block sizes, as a forest fitted to the measurements proposes.

        On a TPU or GPU trials are timed and their values checked. With --on they are compiled for a TPU that need not
        be there, and compared by the compiler's estimate of cycles. `jaxllm tune matmul` and `jaxllm tune program` fit
        cost models of matmuls and of whole programs.

        Args:
            operation: the kernel.
            on: TPU topology to compile for, such as v5e:1x1; by default the device at hand is measured.
            trials: block sizes to measure in each case.
            seed: of the search.
            store: write the fastest block sizes to the device kind's file, from which kernels read them.
        """
        import jax

        from jaxllm.tune import kernel_tuning
        from pallas_kernels import tuned
        from sharding.isolate import run_isolated
        from sharding.topology import Topology

        if trials < 2:
            raise UsageError("give --trials of 2 or more: the present block sizes are one of them.")
        command = f"jaxllm tune {operation}"
        if on is not None:
            topology = Topology.parse(on)
            if topology.platform != "tpu":
                raise UsageError(
                    f"--on {on}: only the TPU compiler estimates cycles; give a TPU topology such as v5e:1x1."
                )
            arguments = {"operation": operation, "trials": trials, "seed": seed}
            rows = run_isolated("jaxllm.tune.kernel_tuning:tune_on", topology, arguments)
            found, kind = [kernel_tuning.TunedCase(*row) for row in rows], topology.device_kind
            command += f" --on {on}"
        elif jax.default_backend() in ("tpu", "gpu"):
            found, kind = kernel_tuning.tune_here(operation, trials, seed), jax.devices()[0].device_kind
        else:
            raise UsageError(
                "nothing to tune: kernels with block sizes run on TPUs and GPUs, and this is "
                f"{jax.devices()[0].device_kind}; give --on v5e:1x1 to rank them by the TPU compiler's cycles."
            )
        if not found:
            raise UsageError(f"{operation}: its kernel has no block sizes to tune on {kind}; give --on v5e:1x1.")
        print(kernel_tuning.table(found))
        if store and any(one.fields for one in found):
            kernel_tuning.store(kind, command, found)
            print(f"stored: {tuned.path(kind)}")
        return 0

    return parse_command(run, argv, "jaxllm tune")


def tune_matmul(argv: list[str]) -> int:
    """Fit a cost model of matmuls and find the tiles of one: `jaxllm tune matmul --shape 512 768 512`."""

    def run(
        samples: int = 160,
        shape: tuple[int, int, int] | None = None,
        trials: int = 8,
        seed: int = 0,
        save: Path | None = None,
    ) -> int:
        """Measures random matmuls with random tiles on the device at hand and fits a forest to them.

        It prints the error on shapes that the forest has not seen. Power is measured and predicted too where the device
        reports it.

        Args:
            samples: matmuls to measure.
            shape: rows, contracted dimension and columns of a matmul whose fastest tiles are searched with the model.
            trials: tiles to measure in that search.
            seed: of the samples.
            save: JSON file to write the measurements to.
        """
        from jaxllm.files import write_json
        from jaxllm.tune import matmul_cost, timing

        if samples < 40 or trials < 1:
            raise UsageError(
                "give --samples of 40 or more, so that some shapes can be held out, and --trials of 1 or more."
            )
        check_outputs(save=save)
        measured = [matmul_cost.measure_matmul(*case) for case in matmul_cost.sample_cases(samples, seed)]
        error = matmul_cost.held_out(measured)
        print(
            f"{samples} matmuls; on shapes held out: R2 {error.r_squared:.3f} of the logarithm of seconds, mean error "
            f"{error.error:.1%}; by FLOPs alone R2 {error.roofline_r_squared:.3f}"
        )
        source = timing.power_source()
        print(f"power: {'not reported by this device' if source is None else f'predicted too, from {source}'}")
        if shape is not None:
            model = matmul_cost.MatmulCostModel.fit(measured, seed)
            asked = matmul_cost.MatmulShape(*shape)
            tiles, found = matmul_cost.best_tiles(asked, trials, model=model)
            took = dict(found.trials)[found.best] if found.best is not None else None
            print(
                f"{shape}: tiles {tuple(tiles or ())}, {(took or 0) * 1e3:.3f} ms, the fastest of {len(found.trials)}"
            )
        if save is not None:
            write_json(save, [sample.__dict__ for sample in measured])
            print(f"saved: {save}")
        return 0

    return parse_command(run, argv, "jaxllm tune matmul")


def tune_program(argv: list[str]) -> int:
    """Fit a model that reads StableHLO and predicts its cost: `jaxllm tune program step.mlir`."""

    def run(
        file: Annotated[Path | None, tyro.conf.Positional] = None,
        /,
        programs: int = 400,
        steps: int = 900,
        seed: int = 0,
    ) -> int:
        """Generates programs, measures them on the device at hand, and trains a small sequence model on their text.

        It prints the error on programs that the model has not seen, and the predictions for a file.

        Args:
            file: StableHLO text, as `jax.jit(f).lower(...).as_text()` gives.
            programs: programs to generate; a quarter of them are held out.
            steps: training steps.
            seed: of the programs and of the model.
        """
        from jaxllm.tune import program_cost

        if programs < 16 or steps < 1:
            raise UsageError(
                "give --programs of 16 or more, of which a quarter are held out, and --steps of 1 or more."
            )
        text = None if file is None else program_cost.read_program(file)
        examples = program_cost.generate(programs, seed)
        model, error = program_cost.train_and_test(examples, steps, seed)
        print(f"errors on {len(examples) // 4} programs held out:")
        for name, one in error.items():
            print(f"{name:<8} R2 {one.r_squared:.3f} of the logarithm, median error {one.median:.1%}")
        if text is not None:
            for name, value in model.predict([text])[0].items():
                print(f"{file}: {name} {value:,.6g}")
        return 0

    return parse_command(run, argv, "jaxllm tune program")
