"""Combinations of elastic runs: what cannot go on with fewer devices.

Rows of the table ``jaxllm.train.combinations``.
"""

from __future__ import annotations

from jaxllm.train.run_features import CO_SERVED, IN_DEVICE_MEMORY, TOGETHER, Refusal

LEAVE_OUT = "leave --elastic out; then all processes restart from the newest checkpoint when one is lost"

ELASTIC: tuple[Refusal, ...] = (
    Refusal(
        "elastic", "outer step", "each replica has a state of its own, and would be lost with its devices", LEAVE_OUT
    ),
    Refusal("elastic", "compressed gradients", "each device along data has an error feedback of its own", LEAVE_OUT),
    Refusal("elastic", "fixed global batch", "its peers are the devices along data, whose number is fixed", LEAVE_OUT),
    Refusal(
        "elastic", "two-level sums", "their groups are of equal size, which devices that are left may not be", LEAVE_OUT
    ),
    Refusal("elastic", "local axis", "its groups are of equal size, which devices that are left may not be", LEAVE_OUT),
    Refusal(
        "elastic", "3-level ZeRO", "its groups are of equal size, which devices that are left may not be", LEAVE_OUT
    ),
    Refusal("elastic", "device order", "it numbers blocks of all devices, of which some may be lost", LEAVE_OUT),
    Refusal("elastic", "context by need", "slots are made for a number of devices, which is fixed", LEAVE_OUT),
    Refusal("elastic", "optimizer state on disk", "files of a lost host are lost with it", IN_DEVICE_MEMORY),
    Refusal("elastic", TOGETHER, "the joint step has its own loop", LEAVE_OUT),
    Refusal("elastic", CO_SERVED, "the engine has its own loop", LEAVE_OUT),
)
