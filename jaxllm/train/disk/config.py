"""DiskConfig: where the files of the disk tier are, and how many layers of them are in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DiskConfig:
    """Optimizer and parameter offload to files: what is on disk is streamed layer by layer.

    Attributes:
        directory: where the files are. Each process has its own, which have no names and are gone when it ends, however
            it ends. Empty: everything is in memory.
        bytes: most bytes of the files of a process; 0: what the file system has free. Files take twice the state
            while a checkpoint is written from them.
        window: layers whose state is in the host's memory at a time, being read, updated or written.
        parameters: the parameters of layers are in files too, and each layer is updated as soon as its gradients are
            there; else the optimizer state alone.
        activations: with ``parameters``: the inputs of layers are in files between forward and backward pass; else in
            the host's memory.
        activation_layers: with ``activations``: so many layers, the first ones, whose backward pass is last, have their
            inputs in files, the others in the host's memory; 0: all layers. "auto": as many as the passes hide, by what
            the second step measures (``hidden_share``).
        host: bytes of the host's memory for each device, in which chunks of the files stay until they are read again,
            beside the layers in the window and saved inputs; 0: none stay.
        chunk: bytes of a chunk.
    """

    directory: str = ""
    bytes: int = 0
    window: int = 4
    parameters: bool = False
    activations: bool = False
    activation_layers: int | Literal["auto"] = 0
    host: int = 0
    chunk: int = 4 * 2**20

    def __post_init__(self) -> None:
        if self.window < 2:
            raise ValueError(
                f"disk: window = {self.window}; give 2 or more, so that one layer is read while another is updated."
            )
        if self.bytes < 0:
            raise ValueError(f"disk: bytes = {self.bytes}; give 0 (what is free) or a number of bytes.")
        if self.parameters and not self.directory:
            raise ValueError("disk: parameters are to be in files, but disk.directory is empty; give a directory.")
        if self.activations and not self.parameters:
            raise ValueError(
                "disk: activations are the saved inputs of layers that are streamed; set disk.parameters to true too."
            )
        count = self.activation_layers
        if count != "auto" and count < 0:
            raise ValueError(f'disk: activation_layers = {count!r}; give 0 (all), a number of layers, or "auto".')
        if self.activation_layers and not self.activations:
            raise ValueError(
                f"disk: activation_layers = {self.activation_layers} says how many layers' inputs are in files; set "
                "disk.activations to true too."
            )
        if self.bytes and not self.directory:
            raise ValueError(f"disk: bytes = {self.bytes} limits files, but disk.directory is empty; give a directory.")
        if self.host < 0:
            raise ValueError(f"disk: host = {self.host}; give 0 (nothing stays) or a number of bytes.")
        if self.host and not self.directory:
            raise ValueError(f"disk: host = {self.host} is for chunks of files, but disk.directory is empty; give one.")
        if self.chunk < 4096 or self.chunk % 4096:
            raise ValueError(f"disk: chunk = {self.chunk}; give a multiple of 4096 bytes, such as {4 * 2**20}.")
