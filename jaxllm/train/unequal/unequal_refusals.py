"""Combinations of uneven rows and uneven optimizer state: what needs equal rows, or equal shards, on all devices.

Rows of the table ``jaxllm.train.combinations``.
"""

from __future__ import annotations

from jaxllm.optim.optimizer_table import kinds_where
from jaxllm.train.run_features import CO_SERVED, NO_STAGES, TOGETHER, Refusal

EVEN_ROWS = "leave parallel.micro_batches empty"
EVEN_STATE = "leave parallel.state_shares empty"

UNEQUAL: tuple[Refusal, ...] = (
    Refusal(
        "uneven rows",
        "numbers of other devices",
        "there is one number for each index of data, or with ZeRO-1 for each of data x fsdp",
        "give as many numbers as the mesh has indices of data, or parallel.zero = 1 and as many as data x fsdp",
    ),
    Refusal(
        "uneven rows",
        "rings",
        "XLA:CPU would mix up the transfers of devices that are in different micro-batches",
        'give parallel.context = "all_gather" and parallel.overlap = "compiler"',
        platform="cpu",
    ),
    *(
        Refusal("uneven rows", other, why, instead)
        for other, why, instead in (
            ("pipeline", "the schedule of a pipeline has a fixed number of micro-batches", NO_STAGES),
            ("local axis", "gradients are summed over data and fsdp alone", "give data the devices of local"),
            ("two-level sums", "gradients are summed in one all-reduce", 'set parallel.reduce to "flat"'),
            ("3-level ZeRO", "it sums the gradients of each micro-batch over data", "set parallel.zero to 3"),
            ("outer step", "the devices of a replica have equally many rows", EVEN_ROWS),
            ("compressed gradients", "they are sums over data of one pass", "leave out grads.compress"),
            ("fixed global batch", "the rows of absent peers could not be told apart", "set peers.batch to 0"),
            (
                "optimizer that changes the step",
                "it has passes over the batch of its own",
                "choose another optimizer, such as adamw",
            ),
            (
                "losses of routers",
                "they are means over the micro-batches of all devices",
                "set routing.balance_loss and routing.z_loss to 0; routing.bias_rate balances by the whole batch",
            ),
            (
                "experts folded over data or fsdp",
                "devices exchange tokens with experts in each micro-batch",
                "give the mesh expert in place of a part of data or fsdp: outside of experts it is the same",
            ),
            ("context by need", "the micro-steps of a batch follow from its documents", EVEN_ROWS),
            (
                "objective over several tokens",
                "its losses may depend on which rows are in a micro-batch",
                "choose an objective over single tokens, such as cross_entropy",
            ),
            ("value head", "the values of a batch come from one forward pass of all rows", EVEN_ROWS),
            (
                "reference model",
                "it scores the whole batch, alike on all devices",
                "leave reference empty and give reference_logprobs with the data",
            ),
            ("parameters on disk", "its programs are of equally many rows on each device", "leave out disk.parameters"),
            ("elastic", "the numbers are those of a fixed number of devices", "leave --elastic out"),
            (TOGETHER, "the rows of a joint step are those of several runs", EVEN_ROWS),
            (CO_SERVED, "the run has the one device that serves", EVEN_ROWS),
        )
    ),
    Refusal(
        "uneven optimizer state",
        "shares of other devices",
        "there is one share for each index of data, or with ZeRO-1 for each of data x fsdp",
        "give as many shares as the mesh has indices of data, or parallel.zero = 1 and as many as data x fsdp",
    ),
    *(
        Refusal("uneven optimizer state", other, why, instead)
        for other, why, instead in (
            (
                "optimizer that is not elementwise",
                "a device updates its part of an array without the rest",
                f"choose one of {', '.join(kinds_where(lambda spec: spec.streamable and spec.elementwise))}",
            ),
            ("narrow moments", "blocks of 8-bit moments are of whole rows", 'set optim.moments to "float32"'),
            ("rounded updates", "parts are updated without a seed of rounding", 'set optim.rounding to "nearest"'),
            ("optimizer state on the host", "the state is in one place", "set host.optimizer to false"),
            ("optimizer state on disk", "the state is in one place", "leave disk.directory empty"),
            ("parameter offload", "parameters are updated where they are used", "set host.params to false"),
            ("pipeline", "stages keep the state of their own layers", NO_STAGES),
            ("3-level ZeRO", "the state is sharded over data already", "set parallel.zero to 3"),
            (
                "experts folded over data or fsdp",
                "devices along data have other experts, not parts of the same ones",
                "give the mesh expert in place of a part of data or fsdp: outside of experts it is the same",
            ),
            ("outer step", "each replica has an optimizer state of its own", EVEN_STATE),
            (
                "loss scaling",
                "a skipped float16 step would need a second copy of the optimizer state",
                "set model.dtype to bfloat16",
            ),
            (
                "undone updates",
                "an update that is undone would need a second copy of the optimizer state",
                'give spikes.action = "rollback"',
            ),
            (
                "absent experts",
                "the state of absent experts would need a second copy",
                "set routing.absent to 0",
            ),
            ("fixed global batch", "a round that is not filled undoes its update", "set peers.batch to 0"),
            ("trainable subset", "the state of all parameters is updated unit by unit", EVEN_STATE),
            ("adapter", "the state of an adapter is small", EVEN_STATE),
            (
                "norms by layer",
                "the updates of single layers are not kept for the log",
                "set observe.layers_every to 0",
            ),
            ("overlapped saves", "the step is more than two programs", 'give checkpoint.saving = "auto"'),
            ("checkpoints in memory", "they restore shards of one size", "set checkpoint.memory to None"),
            ("elastic", "the shares are those of a fixed number of devices", "leave --elastic out"),
            (TOGETHER, "the step is several programs", EVEN_STATE),
            (CO_SERVED, "the run has the one device that serves", EVEN_STATE),
        )
    ),
)
"""The rows."""
