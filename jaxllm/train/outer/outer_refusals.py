"""Combinations of training with little communication: refusals of replicas, outer steps, peers, compressed gradients.

Rows of the table ``jaxllm.train.combinations``.
"""

from __future__ import annotations

from jaxllm.train.run_features import CO_SERVED, IN_DEVICE_MEMORY, NO_STAGES, TOGETHER, WHOLE, Refusal

LOW_COMMUNICATION: tuple[Refusal, ...] = (
    Refusal(
        "two-level sums",
        "outer step",
        "replicas sum gradients in one all-reduce inside a round",
        'set parallel.reduce to "flat"',
    ),
    Refusal(
        "two-level sums",
        "compressed gradients",
        "what is compressed is the sum over data; gradients are summed over local before it",
        'set parallel.reduce to "auto", and give the mesh local',
    ),
    Refusal(
        "replicas",
        "no outer step",
        "the parameters of replicas would never come together",
        'give outer.kind = "diloco", or give the mesh data in place of replica',
    ),
    Refusal(
        "outer step",
        "no replicas",
        "it brings replicas together that train by themselves",
        "give the mesh the axis replica, such as replica=4",
    ),
    Refusal(
        "slow replicas",
        "no pipeline",
        "what is projected are messages between stages",
        "give the mesh the axis stage, such as replica=4,stage=2, or leave out outer.slow",
    ),
    Refusal("outer step", "layerwise optimizer", "its step does not run inside a replica", "choose another optimizer"),
    Refusal("outer step", "optimizer offload", "the states of replicas are in device memory", IN_DEVICE_MEMORY),
    Refusal(
        "outer step", "parameter offload", "the states of replicas are in device memory", "set host.params to false"
    ),
    Refusal(
        "outer step",
        "parameter average",
        "every replica would have an average of its own",
        "set ema.decay to 0",
    ),
    Refusal(
        "outer step",
        "rollback",
        "replicas see spikes of their own and do not communicate inside a round",
        "choose another spikes.action",
    ),
    Refusal(
        "outer step",
        "overlapped saves",
        "the step and its outer step are one program",
        'give checkpoint.saving = "auto"',
    ),
    *(
        Refusal("fixed global batch", other, why, "set peers.batch to 0")
        for other, why in (
            ("no data axis", "the devices along data are the peers"),
            ("pipeline", "sums of gradients last over steps, which pipelines do not support"),
            ("outer step", "a replica has no peers"),
            ("compressed gradients", "the sums of several rounds are sent whole"),
            ("layerwise optimizer", WHOLE),
            ("optimizer of several passes", "the sums are of one pass"),
            ("projected gradients", "gradients of projections do not have the shapes of parameters"),
            ("optimizer offload", "a round without a step would need a second copy of the optimizer state"),
            ("parameter offload", "a round without a step would need a second copy of the parameters"),
            ("loss scaling", "an overflow would stay in the sums"),
            ("delayed fp8 scaling", "the amax history is of all rows"),
            ("reaction to spikes", "a spike would stay in the sums"),
            ("other objective", "rows of absent peers are masked by their targets"),
            ("trainable subset", "all parameters have a sum"),
            ("adapter", "all parameters have a sum"),
            (TOGETHER, "every run would fill a batch of its own"),
            (CO_SERVED, "the run has the one device that serves"),
        )
    ),
    Refusal(
        "compressed gradients",
        "no data axis",
        "gradients are compressed over the mesh axis data alone",
        "give the mesh data, such as data=2,fsdp=4",
    ),
    Refusal(
        "compressed gradients",
        "outer step",
        "gradients inside a replica are sent whole",
        "give outer.compress in place of grads.compress",
    ),
    Refusal("compressed gradients", "pipeline", "the stages of a pipeline sum gradients themselves", NO_STAGES),
    Refusal("compressed gradients", "layerwise optimizer", WHOLE, "choose another optimizer"),
    Refusal(
        "compressed gradients",
        "optimizer of several passes",
        "only the gradients of one pass are compressed",
        "choose another optimizer",
    ),
    Refusal(
        "compressed gradients",
        "loss scaling",
        "an overflow on one device would stay in the error feedback",
        "set model.dtype to bfloat16",
    ),
    Refusal(
        "compressed gradients",
        "delayed fp8 scaling",
        "the amax history is of all rows",
        "choose another model.matmul_precision",
    ),
    Refusal("compressed gradients", "experts", "routing losses are of all rows", "leave out grads.compress"),
    Refusal(
        "compressed gradients",
        "optimizer offload",
        "its gradients are updated layer by layer",
        IN_DEVICE_MEMORY,
    ),
    Refusal(
        "compressed gradients",
        "projected gradients",
        "gradients of projections do not have the shapes of parameters",
        "choose another optimizer",
    ),
    Refusal("compressed gradients", "trainable subset", "all parameters have a gradient", "leave out grads.compress"),
    Refusal(
        "adaptive ranks",
        "rollback",
        "steps that are done again would be compressed by the choice of later ones",
        "choose another spikes.action",
    ),
    Refusal(
        "adaptive ranks",
        "overlapped saves",
        "the step is one of several programs, which are chosen by its gradients",
        'give checkpoint.saving = "auto"',
    ),
    Refusal("compressed gradients", "adapter", "all parameters have a gradient", "leave out grads.compress"),
    Refusal("outer step", "adapter", "every replica would have a copy of the frozen base", "leave out the outer step"),
)
"""The rows."""
