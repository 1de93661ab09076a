"""Refusals of parameters on disk: rows of ``jaxllm.train.combinations``, besides those of optimizer state on disk."""

from __future__ import annotations

PARAMETERS_ON_DISK: tuple[tuple[str, str, str], ...] = (
    (
        "saved values without names",
        "each layer saves its input and named values, and the rest is computed again",
        'set model.remat to "full", "attention", "elementwise" or "save:VALUES" (disk.activations says where they are)',
    ),
    ("delayed fp8 scaling", "the amax history is of all layers", "choose another model.matmul_precision"),
    (
        "FP4 matmuls",
        "their gradients are rounded stochastically, seeded by the tokens of the batch, which single layers do not get",
        "choose another model.matmul_precision",
    ),
    (
        "balance biases that move",
        "they move by the loads of the whole step, when most layers are in their files again",
        "set routing.bias_rate to 0",
    ),
    ("parameter average", "the average needs as much memory as the parameters", "set ema.decay to 0"),
    ("other objective", "layers are streamed for the next-token cross-entropy", "choose the objective cross_entropy"),
    ("ZeRO 1 or 2", "the weights of one layer are gathered at a time", "set parallel.zero to 3"),
    ("3-level ZeRO", "the weights of one layer are gathered at a time", "set parallel.zero to 3"),
    ("int8 gathers", "programs of single layers gather plain weights alone", 'set parallel.gather to "plain"'),
    ("two-level sums", "gradients of single layers are summed in one all-reduce", 'set parallel.reduce to "flat"'),
)
"""The feature, why not, and what to do instead."""
