"""Combinations: which settings of a run do not go together, why, and what to do instead. One row each.

A ``Feature`` is a setting that a run has or has not (``run_features``); a ``Refusal`` is a row of two features.
``check_combinations`` raises for the first row that a run meets; what no row names goes together.
docs/train/combinations.md is made of these rows and of those of rooms of their own, such as
``jaxllm.train.outer.outer_refusals``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from jaxllm.config import ConfigError
from jaxllm.optim.optimizer_table import kinds_where
from jaxllm.parallel.pipeline.stage_split import Remat
from jaxllm.train.config import RunConfig
from jaxllm.train.disk.streamed_refusals import PARAMETERS_ON_DISK
from jaxllm.train.outer.outer_refusals import LOW_COMMUNICATION
from jaxllm.train.recovery.elastic_refusals import ELASTIC
from jaxllm.train.run_features import (
    CO_SERVED,
    FEATURES,
    IN_DEVICE_MEMORY,
    NO_STAGES,
    TOGETHER,
    WHOLE,
    Refusal,
    Sizes,
)
from jaxllm.train.unequal.unequal_refusals import UNEQUAL

REFUSALS: tuple[Refusal, ...] = (
    Refusal("pipeline", "optimizer without stages", "its step needs the whole model on one device", NO_STAGES),
    Refusal(
        "pipeline",
        "layerwise recomputation",
        "a pipeline recomputes alike in all layers",
        f"give one of {', '.join(get_args(Remat))}",
    ),
    Refusal(
        "pipeline", "loss scaling", "loss scaling keeps state between steps, which pipelines do not support", NO_STAGES
    ),
    Refusal(
        "pipeline",
        "delayed fp8 scaling",
        "the amax history is state between steps, which pipelines do not support",
        NO_STAGES,
    ),
    Refusal(
        "pipeline",
        "FP4 matmuls",
        "their gradients are rounded stochastically, seeded by the tokens of the batch, which stages do not pass on",
        NO_STAGES,
    ),
    Refusal("pipeline", "optimizer offload", "state on the host is updated layer by layer on one device", NO_STAGES),
    Refusal("pipeline", "parameter offload", "stages keep their weights on the device", NO_STAGES),
    Refusal(
        "pipeline",
        "rings",
        "XLA:CPU would mix up the transfers of different stages",
        'give parallel.context = "all_gather" and parallel.overlap = "compiler"',
        platform="cpu",
    ),
    Refusal(
        "pipeline",
        "objective over several tokens",
        "the objective is not a sum over single tokens, but a device of a pipeline sees only its own rows",
        NO_STAGES,
    ),
    Refusal(
        "pipeline",
        "reference model",
        "a pipeline cannot score batches with a reference model",
        "leave reference empty and give reference_logprobs with the data, or leave stage out of the mesh",
    ),
    Refusal(
        "pipeline",
        "value head",
        "the values of a batch come from one forward pass of the whole model",
        "choose an algorithm without a value head, such as grpo, or leave stage out of the mesh",
    ),
    Refusal(
        "no pipeline",
        "virtual stages",
        "they divide the stages of a pipeline",
        "leave it out, or give the mesh stages, such as stage=2",
    ),
    Refusal(
        "no pipeline",
        "depths of stages",
        "they divide layers over the stages of a pipeline",
        "leave it out, or give the mesh stages, such as stage=2",
    ),
    Refusal(
        "no pipeline",
        "pipeline offload",
        "it moves the activations of a pipeline's stages",
        "leave it out, or give the mesh stages, such as stage=2",
    ),
    Refusal(
        "pipeline", "local axis", "stages sum gradients over data and fsdp alone", "give data the devices of local"
    ),
    Refusal("pipeline", "two-level sums", "stages sum gradients in one all-reduce", 'set parallel.reduce to "flat"'),
    *(
        Refusal(
            "device order",
            other,
            "its levels are those of devices in the order of their links",
            "leave device_order out",
        )
        for other in ("two-level sums", "3-level ZeRO", "local axis")
    ),
    *LOW_COMMUNICATION,
    *ELASTIC,
    *UNEQUAL,
    *(
        Refusal("recurrent layers", other, why, instead)
        for other, why, instead in (
            (
                "split sequence",
                "a state is passed from token to token, so that one device reads the whole sequence",
                "give data, fsdp or tensor the devices of context and ulysses",
            ),
            (
                "shifted groups",
                "without attention there are no groups to shift",
                "choose another adapter, such as lora",
            ),
            (
                "layouts by layer",
                "layers that split rows over tensor have no heads to split",
                'set parallel.layers to "tensor"',
            ),
            (CO_SERVED, "there is no KV cache of recurrent layers", "train it by itself"),
        )
    ),
    Refusal(
        "3-level ZeRO",
        "one level",
        "its outer levels are data and local",
        "set parallel.zero to 3, or give the mesh data and local around fsdp, such as data=2,local=2,fsdp=2",
    ),
    *(
        Refusal(one, "3-level ZeRO", why, "set parallel.zero to 3")
        for one, why in (
            ("pipeline", "stages keep their weights in two levels"),
            ("outer step", "replicas keep their weights in two levels"),
            ("compressed gradients", "the devices along data hold parts of one gradient, not the whole"),
            ("folded experts", "experts that are folded are stored by the axes of their folding"),
            ("layerwise optimizer", "the optimizer gathers the weights of one layer at a time"),
            ("projected gradients", "the optimizer gathers the weights of one layer at a time"),
            (
                TOGETHER,
                "JAX does not batch arrays with partial sums, which the gradients are until the end of the step",
            ),
        )
    ),
    *(
        Refusal(one, "int8 gathers", why, 'set parallel.gather to "plain"')
        for one, why in (
            ("pipeline", "stages gather their weights by themselves"),
            ("outer step", "replicas gather plain weights alone"),
            ("compressed gradients", "their step gathers plain weights alone"),
            ("layerwise optimizer", "the optimizer gathers the weights of a layer by itself"),
            ("projected gradients", "the optimizer gathers the weights of a layer by itself"),
            (TOGETHER, "the base that runs share is gathered plain"),
        )
    ),
    *(
        Refusal("absent experts", other, why, "set routing.absent to 0")
        for other, why in (
            ("pipeline", "stages have no key to draw absences with"),
            ("optimizer offload", "the state of absent experts would need a second copy"),
            ("parameter offload", "the parameters of absent experts would need a second copy"),
            ("adapter", "the experts themselves are frozen"),
            ("trainable subset", "absent experts keep what they have learned"),
        )
    ),
    Refusal(TOGETHER, "adaptive ranks", "the step of all runs is one program", "choose another grads.compress"),
    Refusal(
        "optimizer of several passes",
        "loss scaling",
        "the optimizer does not support loss scaling, which needs one pass with all gradients per step",
        "give another model.dtype than float16",
    ),
    Refusal(
        "optimizer of several passes",
        "delayed fp8 scaling",
        "the optimizer does not support delayed fp8 scaling, which needs one pass with all gradients per step",
        "give another model.matmul_precision than fp8_delayed",
    ),
    Refusal(
        "optimizer without backward pass",
        "scaled embedding gradient",
        "there is no backward pass to scale",
        "set model.embed_grad to 1",
    ),
    Refusal(
        "optimizer without backward pass",
        "selective recomputation",
        "there is no backward pass that needs activations",
        'set model.remat to "full"',
    ),
    Refusal("layerwise optimizer", "gradient accumulation", WHOLE, "set accumulate to 1 and reduce data.batch_size"),
    Refusal(
        "layerwise optimizer",
        "ZeRO 1 or 2",
        "the optimizer gathers the weights of one layer at a time",
        "set parallel.zero to 3",
    ),
    Refusal("layerwise optimizer", "experts", "their routing losses need all layers", "choose another optimizer"),
    Refusal(
        "layerwise optimizer",
        "norms by layer",
        f"{WHOLE}, so their norms cannot be logged",
        "set observe.layers_every to 0",
    ),
    Refusal("layerwise optimizer", "reaction to spikes", f"{WHOLE} before an update", 'give spikes.action = "none"'),
    Refusal(
        "layerwise optimizer",
        "objective with its own forward passes",
        "the objective would have to run layer by layer",
        "choose another optimizer",
    ),
    Refusal(
        "layerwise backward pass",
        "partial recomputation",
        "the optimizer saves only the input of each layer and recomputes the layer",
        'set model.remat to "full"',
    ),
    Refusal(
        "layerwise backward pass",
        "FP4 matmuls",
        "their gradients are rounded stochastically, seeded by the tokens of the batch, which single layers do not get",
        "choose another optimizer or model.matmul_precision",
    ),
    Refusal(
        "layerwise optimizer",
        "overlapped saves",
        "the optimizer updates layers while it computes gradients",
        'give checkpoint.saving = "auto"',
    ),
    Refusal(
        "averaging optimizer", "lowered rate", "the updates move averages and cannot be scaled", "give another action"
    ),
    Refusal(
        "optimizer of all parameters",
        "trainable subset",
        "the optimizer updates all parameters",
        "choose another optimizer",
    ),
    Refusal(
        "context parallelism",
        "shifted groups",
        "groups of tokens would lie on several devices",
        "leave context out of the mesh",
    ),
    Refusal(
        "objective with its own forward passes",
        "shifted groups",
        "the objective makes the attention context itself",
        "choose another objective or adapter",
    ),
    Refusal(
        "context parallelism",
        "virtual tokens",
        "they have the first places of each row, which one device would hold",
        "leave context out of the mesh",
    ),
    Refusal(
        "objective with its own forward passes",
        "virtual tokens",
        "the objective makes the attention context itself",
        "choose another objective or adapter",
    ),
    Refusal(
        "reference model",
        "virtual tokens",
        "the reference has none, and reads the same rows",
        "leave the reference out, or choose an adapter of weights",
    ),
    Refusal("optimizer of all parameters", "adapter", "the optimizer updates the base too", "choose another optimizer"),
    Refusal(
        "adapter",
        "low-precision matmuls",
        "matmuls with an adapted weight run in compute dtype",
        'choose model.matmul_precision = "plain"',
    ),
    Refusal(
        "adapter",
        "compact activations",
        "matmuls with an adapted weight have no compact form",
        'choose model.remat = "none" or "elementwise"',
    ),
    Refusal(
        "adapter",
        "ring matmuls",
        "ring collective matmuls multiply plain weights only",
        'give parallel.overlap = "compiler"',
    ),
    Refusal(
        "adapter",
        "parameter average",
        "the average would hold a copy of the frozen base",
        "set ema.decay to 0",
    ),
    Refusal(
        "adapter",
        "balance biases that move",
        "the routers' balance biases are part of the frozen base",
        "set routing.bias_rate to 0",
    ),
    Refusal(
        "balance biases that move",
        "frozen balance biases",
        "the routers' balance biases move though they are frozen",
        'set routing.bias_rate to 0, or add "balance_bias" to trainable',
    ),
    Refusal(
        "optimizer of the cross-entropy",
        "other objective",
        "the optimizer estimates the Hessian of next-token cross-entropy",
        "choose another optimizer",
    ),
    Refusal(
        "rounded updates",
        "lowered rate",
        "updates that are already rounded would be scaled",
        'set optim.rounding to "nearest"',
    ),
    Refusal(
        "rounded updates",
        "parameters not in bfloat16",
        "rounding requires parameters stored in bfloat16",
        'give optim.rounding = "nearest", or model.param_dtype = "bfloat16"',
    ),
    Refusal(
        "rounded updates",
        "optimizer offload",
        "the state of a layer is streamed without a seed of rounding",
        'set optim.rounding to "nearest"',
    ),
    Refusal(
        "optimizer offload",
        "optimizer that is not streamed",
        "the state is updated layer by layer",
        f"choose one of {', '.join(kinds_where(lambda spec: spec.streamable))}",
    ),
    Refusal(
        "optimizer offload",
        "loss scaling",
        "a skipped float16 step would need a second copy of the optimizer state",
        "set model.dtype to bfloat16",
    ),
    Refusal(
        "optimizer offload",
        "undone updates",
        "an update that is undone would need a second copy of the optimizer state",
        'give spikes.action = "rollback", or ' + IN_DEVICE_MEMORY,
    ),
    Refusal("optimizer offload", "trainable subset", "the state of all layers is streamed", IN_DEVICE_MEMORY),
    Refusal("optimizer offload", "adapter", "the state of all layers is streamed", IN_DEVICE_MEMORY),
    Refusal(
        "optimizer state on disk",
        "optimizer state on the host",
        "the state is in one place",
        "set host.optimizer to false, or leave disk.directory empty",
    ),
    Refusal(
        "optimizer state on disk",
        "fixed global batch",
        "a round that is not filled undoes its update, of which the files have no second copy",
        "set peers.batch to 0",
    ),
    Refusal(
        "optimizer state on disk",
        "overlapped saves",
        "the step is more than two programs, and saves read files of their own beside it",
        'give checkpoint.saving = "auto"',
    ),
    Refusal(
        "optimizer state on disk",
        "checkpoints in memory",
        "a snapshot would have the optimizer state in the host's memory",
        "set checkpoint.memory to None",
    ),
    Refusal(
        "optimizer state on disk",
        "norms by layer",
        "the updates of single layers are not kept for the log",
        "set observe.layers_every to 0",
    ),
    *(Refusal("parameters on disk", *row) for row in PARAMETERS_ON_DISK),
    *(
        Refusal(other, "ladder residual", why, 'set model.residual to "plain"')
        for other, why in (
            ("pipeline", "what a sublayer has not read yet would have to travel between stages"),
            ("layerwise optimizer", "layers are run one by one"),
            ("optimizer without backward pass", "layers are run one by one"),
            ("parameters on disk", "layers are run one by one"),
            (CO_SERVED, "layers are run one by one"),
        )
    ),
    Refusal(
        "updates on the host",
        "narrow moments",
        "the host's CPU updates moments in float32",
        'give optim.moments = "float32", or host.device_every = 1',
    ),
    Refusal(
        "parameter offload",
        "optimizer of whole gradients",
        "the gradients need as much memory as the parameters",
        f"choose one of {', '.join(kinds_where(lambda spec: spec.layerwise))}",
    ),
    Refusal(
        "parameter offload",
        "parameter average",
        "the average needs as much device memory as the parameters",
        "set ema.decay to 0",
    ),
    Refusal(
        "update of the next step",
        "trainable subset",
        "updates of the parameters of all layers are streamed",
        "set host.params to false",
    ),
    Refusal(
        "update of the next step",
        "adapter",
        "updates of the parameters of all layers are streamed",
        "set host.params to false",
    ),
    Refusal(
        "rollback", "checkpoints in memory", "a rollback restores checkpoints on disk", "set checkpoint.memory to None"
    ),
    *(
        Refusal("context by need", other, why, instead)
        for other, why, instead in (
            (
                "no context parallelism",
                "long rows are split over the axis context",
                'give the mesh context, such as context=4, or set parallel.context to "ring"',
            ),
            ("pipeline", "the schedule of a pipeline has a fixed number of micro-batches", NO_STAGES),
            ("outer step", "replicas run one program over equally many micro-steps", 'set parallel.context to "ring"'),
            ("compressed gradients", "the devices along data have rows of their own", "leave out grads.compress"),
            ("fixed global batch", "the rows of absent peers could not be told apart", "set peers.batch to 0"),
            (
                "optimizer that changes the step",
                "it has passes over a batch of its own",
                "choose another optimizer, such as adamw",
            ),
            (
                "other objective",
                "its batches have pairs, or values that are computed row by row",
                "train next-token cross-entropy",
            ),
            (
                "losses of routers",
                "they are means of a micro-batch, and micro-steps have documents of one length",
                "set routing.balance_loss and routing.z_loss to 0; routing.bias_rate balances by the whole batch",
            ),
            ("virtual tokens", "they are at the start of each row", "choose another adapter, such as lora"),
            ("parameters on disk", "its programs are of rows in one layout", "leave out disk.parameters"),
            (
                TOGETHER,
                "the micro-steps of a joint step would be those of one run",
                "train the runs one after the other",
            ),
        )
    ),
    Refusal(
        "slots by number of tokens",
        "gradient accumulation",
        "the micro-steps of a batch follow from its documents",
        "set accumulate to 1, or parallel.slot to 0",
    ),
    *(
        Refusal(one, "2D tensor parallelism", why, 'set parallel.tensor to "1d", and leave features out of the mesh')
        for one, why in (
            ("pipeline", "stages store embedding and head by the features that it splits"),
            ("ring matmuls", "a ring overlaps the sums over one mesh axis, and a matmul would have those of two"),
            ("folded experts", "a folding is of whole mesh axes, and of tensor there would be two"),
            ("FP4 matmuls", "blocks that are rotated and share a scale would be cut by the shards of features"),
        )
    ),
    *(
        Refusal("layouts by layer", other, why, 'set parallel.layers to "tensor"')
        for other, why in (
            ("no tensor parallelism", "they are two uses of the mesh axis tensor"),
            ("pipeline", "stages run one layout of rows"),
            ("layerwise optimizer", "layers are run one by one"),
            ("optimizer without backward pass", "layers are run one by one"),
            ("parameters on disk", "layers are run one by one"),
            (CO_SERVED, "layers are run one by one"),
            ("2D tensor parallelism", "layers that split rows over tensor have no features to split"),
            ("folded experts", "a folding is of one use of each mesh axis"),
            ("context by need", "its slots are of one layout of rows"),
        )
    ),
    Refusal("no experts", "folded experts", "there is nothing to fold", "leave parallel.experts empty"),
    Refusal(
        "pipeline",
        "experts folded over data or fsdp",
        "a stage sees its own rows alone",
        "give the mesh expert in place of a part of data or fsdp: outside of experts it is the same",
    ),
    Refusal(
        "experts",
        "low-precision matmuls",
        "grouped matmuls of experts have no low-precision form",
        'choose model.matmul_precision = "plain"',
    ),
    Refusal(
        "compact activations",
        "experts",
        "grouped matmuls of experts have no compact form",
        'choose model.remat = "none" or "elementwise"',
    ),
    Refusal(
        "compact activations",
        "latent attention",
        "the projections between latents and heads have no compact form",
        'choose model.remat = "none" or "elementwise"',
    ),
    Refusal(
        "compact activations",
        "low-precision matmuls",
        "a matmul is either of rounded operands or of a projected input",
        'choose model.matmul_precision = "plain", or model.remat = "none" or "elementwise"',
    ),
    Refusal(
        "projected gradients",
        "offloaded or compact activations",
        "the optimizer keeps projections of the inputs of matmuls itself",
        'choose model.remat = "none" or "elementwise"',
    ),
    Refusal(
        "projected gradients",
        "latent attention",
        "the projections between latents and heads have no projected form",
        "choose another optimizer",
    ),
    Refusal(
        "projected gradients",
        "low-precision matmuls",
        "a matmul is either of rounded operands or of a projected input",
        'choose model.matmul_precision = "plain"',
    ),
    Refusal(
        "projected gradients",
        "ZeRO 1 or 2",
        "the optimizer gathers the weights of one layer at a time",
        "set parallel.zero to 3",
    ),
    Refusal(
        "projected gradients",
        "ring matmuls",
        "ring collective matmuls multiply plain weights only",
        'give parallel.overlap = "compiler"',
    ),
    Refusal(
        "ring matmuls",
        "low-precision matmuls",
        "low precision is not supported by ring collective matmuls",
        'give parallel.overlap = "compiler"',
    ),
    Refusal(
        "ring matmuls",
        "offloaded or compact activations",
        "the recomputation policy is not supported with ring collective matmuls",
        'give parallel.overlap = "compiler", or another model.remat',
    ),
    Refusal(
        "objective with its own forward passes",
        "tokens out of order",
        "the objective runs on rows in their own order",
        "set parallel.layout to contiguous",
    ),
    Refusal(
        "objective with its own forward passes",
        "routing losses",
        "the objective runs without the routing losses of experts",
        "set them to 0",
    ),
    Refusal(
        TOGETHER,
        "no adapter",
        "runs share the frozen base, and only adapters are their own",
        'choose an adapter, such as adapter.kind = "lora"',
    ),
    Refusal(
        TOGETHER,
        "shifted groups",
        "longlora trains norms and the embedding too, whose gradients are not batched over runs on a mesh",
        "choose another adapter",
    ),
    Refusal(TOGETHER, "pipeline", "the base that runs share is not placed on stages", NO_STAGES),
    Refusal(
        TOGETHER,
        "layerwise optimizer",
        "the optimizer updates layers while it computes gradients, which are taken for all runs at once",
        "choose another optimizer",
    ),
    Refusal(
        TOGETHER,
        "averaging optimizer",
        "it takes gradients at another point, which each run has by itself",
        "choose another optimizer",
    ),
    Refusal(
        TOGETHER,
        "projected gradients",
        "gradients are taken for all runs at once, of the adapters themselves",
        "choose another optimizer",
    ),
    Refusal(
        TOGETHER,
        "optimizer of the cross-entropy",
        "it takes further gradients, of each run by itself",
        "choose another optimizer",
    ),
    Refusal(
        TOGETHER,
        "ZeRO 1 or 2",
        "JAX does not batch arrays with partial sums, which the gradients are until the end of the step",
        "set parallel.zero to 3",
    ),
    Refusal(TOGETHER, "loss scaling", "every run would have a scale of its own", "set model.dtype to bfloat16"),
    Refusal(TOGETHER, "rollback", "the other runs would have to go back too", "choose another spikes.action"),
    Refusal(
        TOGETHER,
        "overlapped saves",
        "gradients and updates of all runs are one program",
        'give checkpoint.saving = "auto"',
    ),
    Refusal(TOGETHER, "checkpoints in memory", "a process holds those of one run", "set checkpoint.memory to None"),
    Refusal(
        TOGETHER,
        "reference model",
        "a batch is scored for one run",
        "leave reference empty and give reference_logprobs with the data, or train the runs one after the other",
    ),
    Refusal(
        TOGETHER,
        "objective with its own forward passes",
        "only forward passes of the training loss are batched over runs",
        "choose another objective, or train the runs one after the other",
    ),
    Refusal(
        TOGETHER,
        "trackers of one run",
        "these trackers follow one run of a process",
        "use tensorboard, or leave observe.sinks empty",
    ),
    Refusal(
        CO_SERVED,
        "no adapter",
        "the weights that are served stay as they are, and an adapter is trained beside them",
        'choose an adapter, such as adapter.kind = "lora"',
    ),
    Refusal(
        CO_SERVED,
        "adapter that is not LoRA",
        "it changes the served weights, the architecture or the attention",
        "choose lora, rslora or dora",
    ),
    Refusal(CO_SERVED, "trainable subset", "only adapters are trained beside serving", "leave trainable empty"),
    Refusal(CO_SERVED, "pipeline", "the run has the one device that serves", NO_STAGES),
    Refusal(
        CO_SERVED,
        "outer step",
        "the run has the one device that serves",
        'set outer.kind to "none"',
    ),
    Refusal(CO_SERVED, "compressed gradients", "the run has the one device that serves", "leave grads.compress empty"),
    Refusal(CO_SERVED, "experts", "routing losses are sums over whole batches", "train it by itself"),
    Refusal(CO_SERVED, "low-precision matmuls", "served matmuls are plain", 'set model.matmul_precision to "plain"'),
    Refusal(CO_SERVED, "loss scaling", "a step may have to be repeated", "set model.dtype to bfloat16 or float32"),
    Refusal(
        CO_SERVED,
        "offloaded or compact activations",
        "the residuals of each chunk of tokens are saved by themselves",
        "give one of none, elementwise, attention, full",
    ),
    Refusal(
        CO_SERVED,
        "optimizer that changes the step",
        "gradients are taken in chunks of tokens, at the parameters",
        "choose another optimizer, such as adamw",
    ),
    Refusal(CO_SERVED, "reaction to spikes", "served steps are not undone", 'set spikes.action to "none"'),
    Refusal(CO_SERVED, "norms by layer", "only the step's own metrics are logged", "set observe.layers_every to 0"),
    Refusal(CO_SERVED, "profiles", "steps of the run and of requests are interleaved", "leave observe.profile empty"),
    Refusal(
        CO_SERVED,
        "evaluation during the run",
        "an evaluation would delay requests",
        "set eval_every to 0, and evaluate the finished run with jaxllm eval",
    ),
    Refusal(CO_SERVED, "optimizer offload", "the state of an adapter is small", IN_DEVICE_MEMORY),
    Refusal(CO_SERVED, "parameter offload", "the weights are those that are served", "set host.params to false"),
    Refusal(CO_SERVED, "overlapped saves", "gradients are taken in many programs", 'give checkpoint.saving = "auto"'),
    Refusal(CO_SERVED, "blocking saves", "requests would wait for the disk", 'give checkpoint.saving = "auto"'),
    Refusal(CO_SERVED, "checkpoints in memory", "the process serves requests", "set checkpoint.memory to None"),
    Refusal(
        CO_SERVED,
        "reference model",
        "a batch is scored by whole rows, which would delay requests",
        "leave reference empty and give reference_logprobs with the data",
    ),
    Refusal(
        CO_SERVED,
        "objective over several tokens",
        "chunks of tokens need a sum over single tokens",
        "choose another objective, such as cross_entropy",
    ),
    Refusal(CO_SERVED, "parameter average", "only the adapter itself is kept", "set ema.decay to 0"),
)


def refused(run: RunConfig, sizes: Sizes, platform: str = "", also: Sequence[str] = ()) -> list[Refusal]:
    """Rows of the table that a run on a mesh meets.

    Args:
        run: the run.
        sizes: sizes of its mesh axes.
        platform: of the devices, such as "cpu"; empty: unknown, so that rows of single platforms do not count.
        also: names of further features that it has.
    """
    on = {name for name, feature in FEATURES.items() if feature.on(run, sizes)} | set(also)
    return [row for row in REFUSALS if row.one in on and row.other in on and row.platform in ("", platform)]


def check_combinations(run: RunConfig, sizes: Sizes, platform: str = "", also: Sequence[str] = ()) -> None:
    """Checks that a run's settings go together.

    Args:
        run: the run.
        sizes: sizes of its mesh axes.
        platform, also: as for ``refused``.

    Raises:
        ConfigError: names the two settings, why they do not, and what to do instead.
    """
    for row in refused(run, sizes, platform, also):
        one, other = (FEATURES[name].says(run) for name in (row.one, row.other))
        where = f" on {row.platform}" if row.platform else ""
        raise ConfigError(f"{one} does not go with {other}{where}: {row.why}; {row.instead}.")


def markdown() -> str:
    """Table of all rows, for the page of combinations."""
    rows = [
        f"| {row.one} | {row.other}{f', on {row.platform}' if row.platform else ''} | {row.why} | {row.instead} |"
        for row in REFUSALS
    ]
    return "\n".join(["| this | with this | why not | instead |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    print(markdown())
