"""Bytes of a step whose parameters are streamed: what the tier reads and writes, and what a device holds at most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxllm.train.disk.layer_stream_step import IN_FLIGHT
from jaxllm.train.disk.state_files import StateFiles
from jaxllm.train.disk.step_bytes import shard_bytes
from jaxllm.train.disk.streamed_programs import StreamedModel, StreamedPrograms


class StepTraffic(NamedTuple):
    """Bytes that the disk tier moves in a step, after the first one.

    Attributes:
        read, written: of a process.
    """

    read: int
    written: int

    def __str__(self) -> str:
        """For the log."""
        return f"each step reads {self.read / 2**30:.3f} GiB and writes {self.written / 2**30:.3f} GiB"


def step_traffic(
    params: StateFiles, files: StateFiles, inputs: Sequence[int] = (), clipped: bool = False
) -> StepTraffic:
    """Bytes read and written in a step, however many micro-batches it has.

    Each layer is asked for twice, forward and backward, and its optimizer state once; what the window still has is not
    read. At either turn that is the parameters of ``window`` layers. The window of the optimizer state ends a step with
    the first layers, and begins one with the last ones. That outside of layers has a place beside the window, and is
    read in each step.

    Args:
        params, files: of parameters and optimizer state.
        inputs: bytes of each input of a layer that is saved in a file, in the order of the forward pass.
        clipped: gradients are clipped, and the backward pass is made twice. With fewer than twice as many layers as the
            window has, the bytes read are an upper bound.
    """
    sizes, window = [params.layout(n).size for n in range(len(params.units))], params.window
    layers = [files.layout(n).size for n, unit in enumerate(files.units) if unit.segment]
    ends = [files.layout(n).size for n, unit in enumerate(files.units) if not unit.segment]
    kept = min(window, len(layers))
    states = sum(layers) - sum(layers[max(0, len(layers) - window) : kept])
    read = sum(sizes[window:]) + sum(sizes[: max(0, len(sizes) - window)]) + states + sum(ends)
    read += sum(inputs[: max(0, len(inputs) - window)])
    if clipped:  # from the first layers, which the window has after a backward pass, to the last ones again
        # What it has of them is in both windows, at least as many as overlap; of unequal layers it may be the smallest.
        read += sum(sum(one) - sum(sorted(one)[: max(0, 2 * window - len(one))]) for one in (sizes, inputs))
    return StepTraffic(read, sum(sizes) + sum(layers) + sum(ends) + sum(inputs))


def micro_batch_major_reads(sizes: Sequence[int], window: int, micro_batches: int) -> int:
    """Bytes of parameters read in a step in which each micro-batch goes through all layers by itself.

    Layer-major order reads what one micro-batch does (Harmony, arXiv:2202.01306, section 3). Gradients are not counted,
    which each micro-batch would read and write too.

    Args:
        sizes: bytes of each layer.
        window: layers in memory.
        micro_batches: of a step.
    """
    return micro_batches * (sum(sizes[window:]) + sum(sizes[: max(0, len(sizes) - window)]))


class DevicePeak(NamedTuple):
    """Most bytes of a device in a streamed step, by what they are.

    Attributes:
        ends: parameters outside of layers and their gradients.
        layers: parameters, gradients and optimizer state of the layers whose programs run.
        leaving: new parameters and optimizer state on their way to the files.
        ends_state: optimizer state of what is outside of layers, before and after.
        hidden: hidden states of micro-batches.
        temporaries: of the largest program.
        values: named values that layers save.
    """

    ends: int
    layers: int
    leaving: int
    ends_state: int
    hidden: int
    temporaries: int
    values: int = 0

    @property
    def arrays(self) -> int:
        """Bytes of arrays; without temporaries."""
        return sum(self) - self.temporaries


def device_peak(programs: StreamedPrograms, of: StreamedModel, files: StateFiles) -> DevicePeak:
    """Most bytes of a device, which do not depend on the number of layers.

    Args:
        programs: compiled.
        of: model and state, with the files of the parameters.
        files: of the optimizer state.
    """
    params = {s: shard_bytes(of.params.abstract_rows(s)) for s in of.segments}
    ends = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in of.params.kept_of(of.abstract.params)
    )
    each: list[Any] = [programs.split, programs.embed, programs.head, programs.lookup, programs.ends, programs.finish]
    each += [*programs.forward.values(), *programs.backward.values(), *programs.update.values()]
    return peak_of_layers(
        [LayerBytes(params[s], shard_bytes(files.abstract_rows(s))) for s in of.segments],
        len(of.params.units),
        of.params.window,
        LayerBytes(ends, shard_bytes(files.abstract_rows(""))),
        programs.embed.memory_analysis().output_size_in_bytes,
        max(one.memory_analysis().temp_size_in_bytes for one in each),
        max(shard_bytes([x for _, x in saved]) for saved in programs.values.values()),
    )


class LayerBytes(NamedTuple):
    """Bytes of a layer, or of what is outside of layers, on a device.

    Attributes:
        parameters, state: of its parameters, and of their optimizer state.
    """

    parameters: int
    state: int


def peak_of_layers(
    layers: Sequence[LayerBytes],
    count: int,
    window: int,
    ends: LayerBytes,
    hidden: int,
    temporaries: int,
    values: int = 0,
) -> DevicePeak:
    """Most bytes of a device, by the bytes of layers; see ``device_peak``.

    Args:
        layers: of each kind of layer.
        count: number of layers.
        window: layers in the host's memory.
        ends: of what is outside of layers.
        hidden: bytes of a micro-batch's hidden state.
        temporaries: of the largest program.
        values: bytes of the named values that a layer saves of a micro-batch.
    """
    running = IN_FLIGHT + 1
    # A program has a hidden state or its gradient as argument and as result; one more is copied to or from the host.
    return DevicePeak(
        ends=2 * ends.parameters,
        layers=min(running, count) * max(2 * one.parameters + one.state for one in layers),
        leaving=min(window, count) * max(one.parameters + one.state for one in layers),
        ends_state=2 * ends.state,
        hidden=4 * running * hidden,
        temporaries=temporaries,
        values=value_copies() * values,
    )


def value_copies() -> int:
    """Times that a device holds what a layer saves of a micro-batch, at most: once for each program of a layer that is
    dispatched and not done, or whose values are on their way to the host (``saved_inputs.Leaving``)."""
    return IN_FLIGHT + 1
