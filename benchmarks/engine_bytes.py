"""Bytes that a decode step of a model moves, by those of its weights and cache, compiled for a device far away.

    python -m benchmarks.engine_bytes [--on v6e:1x1,h100:1x1] [--batches 1,16,32] [--context 1024]
        [--layers stacked,apart] [--weights bfloat16,int4,int8] [--verify 0,1,2,4,7] [--tiny]
        [--model qwen3_30b_a3b --cut 4] [--experts fused,sorted]

The step is the engine's decode program of a recipe in bfloat16, or with its matrices packed. Bytes come
from the text of the compiled program (`jaxllm.compiler.hbm_traffic`); the attention kernel's loops depend on data, so
its traffic is added as the KV cache read once. Work that a call does once, before its first decode step (a weight gets
another layout), is reported separately, since one call runs up to eight decode steps. Layers are stacked, as in
training, or unstacked. "planned" are bytes of weights and cache by the formula of `jaxllm plan`, "arguments" those of
the compiled program's arguments. With ``--verify N`` the step verifies N draft tokens of each sequence instead: "moved"
are its bytes, and "cycles" the compute time of the call by the TPU compiler's estimate, of a decode call with one step.
Of a mixture, "weights" are all experts; "fused" has them in one kernel (``pallas_kernels.fused_moe``) where the device
has it, "sorted" in grouped matmuls of rows sorted by expert. No kernel has an estimate of cycles.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any


def engine_program(
    topology: Any, config: Any, shape: Any, page: int, layers: str, weights: str = "bfloat16", kv_dtype: str = "auto"
) -> Any:
    """Step of an engine on one device, compiled for a device that is not here, in a child set up for its compiler.

    Args:
        config: architecture, in bfloat16.
        shape: ``StepShape``, of a model whose layers have one shape of KV cache.
        page: tokens of a page.
        layers: "stacked" or "apart".
        weights: "bfloat16", or a row of ``WEIGHT_FORMATS``.
        kv_dtype: see ``EngineConfig``.

    Returns:
        the program, and abstract values of the weights, the page pool (``Slots``) and the other arguments.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxllm.infer.runner.paged_cache import layer_groups
    from jaxllm.infer.runner.serving_mesh import serving_model, with_layouts
    from jaxllm.infer.runner.step.engine_step import EngineStep
    from jaxllm.models import functional, unstack_layers
    from jaxllm.plan.formulas.serving_step import PLAIN
    from jaxllm.quant.packing import packed_shapes
    from pallas_kernels.paged_attention.pages import empty_slots, host_sharding

    model, groups = serving_model(functional(config)), layer_groups(config, kv_dtype)
    # Of one device and with nothing to track: as an engine on one device is, but compiled for this one.
    mesh = jax.sharding.Mesh(np.array(topology.devices()[:1]), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.NamedSharding(mesh, jax.P())

    def abstract(size: Any, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(size, dtype, sharding=place)

    with jax.set_mesh(mesh):
        sizes = {"layers": config.layers, "pages": shape.requests * shape.columns + 1, "page_size": page}
        sizes |= {"dtype": groups[0].plain, "sequences": shape.slots}
        held = jax.eval_shape(lambda: empty_slots(groups[0].format(), **sizes))
        pool = jax.tree.map(lambda x: abstract(x.shape, x.dtype), held)
        if groups[0].format().kv_format.on_host:
            pool = pool._replace(data=pool.data.update(sharding=host_sharding(topology.devices()[0])))
        shapes = model.abstract() if weights == PLAIN else packed_shapes(model, weights)
        if layers == "apart":
            shapes = jax.eval_shape(unstack_layers, shapes)
        params = jax.tree.map(lambda x: abstract(x.shape, x.dtype), shapes)
        params = with_layouts(model, params, topology.platform)
        step = jax.jit(EngineStep(model, model, groups, shape, config.vocab_size).__call__, donate_argnums=(1, 2))
        others = tuple(abstract((1, n), jnp.int32) for n in (shape.requests, shape.inputs.size))
        return step.lower(params, (pool,), *others).compile(), params, pool, others


def compiled(
    topology: Any,
    batch: int,
    context: int,
    layers: str,
    weights: str = "bfloat16",
    verify: int = 0,
    tiny: bool = False,
    model: str = "llama3_8b",
    cut: int = 0,
    experts: str = "fused",
) -> dict[str, Any]:
    """In a child that is set up for the topology's compiler.

    Args:
        model: recipe.
        cut: layers that are left of it; 0: all.
        experts: "fused" or "sorted".
        weights: "bfloat16", or a row of ``WEIGHT_FORMATS``.
        verify: draft tokens of each sequence that the step verifies; 0: it decodes.
        tiny: two layers, narrow, to try the command.
    """
    import jax

    from jaxllm.cli.recipe_arguments import find_recipe
    from jaxllm.compiler import collectives, hbm_traffic
    from jaxllm.infer.decode_benchmark import kv_bytes_per_token
    from jaxllm.infer.runner.step.step_shape import StepShape
    from jaxllm.models.moe import moe
    from jaxllm.plan.formulas.serving_step import ServingStepModel
    from jaxllm.plan.hardware import Cluster
    from sharding import MeshSpec

    config = dataclasses.replace(find_recipe(model)().model, param_dtype="bfloat16", dtype="bfloat16")
    if cut:
        config = dataclasses.replace(config, layers=cut)
    if experts == "sorted":
        moe._is_fused = lambda *_: False
    if tiny:
        config = dataclasses.replace(config, layers=2, vocab_size=512)
    page, longest, rows = 32, 2 * context, 1 + verify
    columns = longest // page
    shape = StepShape(batch * rows, batch, not verify, False, batch, columns, 1, 8, 1, "float32", rows)
    program, params, pool, _ = engine_program(topology, config, shape, page, layers, weights)
    memory: Any = program.memory_analysis()
    text = program.as_text() or ""
    found = hbm_traffic.read(text)
    # Of a program that decodes several steps, one is what a second turn of its loop adds.
    step_bytes = found.bytes if verify else hbm_traffic.read(text, turns=2).bytes - found.bytes
    nbytes = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    read = nbytes(params)
    if not config.tied:
        read -= nbytes(params["embedding"]["table"])  # of which a row a token is read
    cluster = Cluster.parse(topology.name)
    plan = ServingStepModel(config, cluster, MeshSpec.parse("data=1"), weights=weights)
    cache = batch * context * kv_bytes_per_token(config)
    return {
        "weights": read, "cache": cache, "arguments": memory.argument_size_in_bytes,
        "planned": plan.device_weight_bytes + plan.token_bytes * page * pool.data.shape[1],
        "moved": step_bytes + cache, "before": found.bytes - step_bytes, "temporaries": memory.temp_size_in_bytes,
        "data_loops": found.data_loops, "kernels": found.kernels, "cycles": collectives.read(text).cycles,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles and prints."""
    from sharding.isolate import run_isolated

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="v6e:1x1,h100:1x1")
    parser.add_argument("--batches", default="1,16,32")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", default="stacked,apart")
    parser.add_argument("--weights", default="bfloat16", help="bfloat16, or formats of packed weights: int4,nf4,...")
    parser.add_argument("--verify", default="0", help="draft tokens that the step verifies; 0: a decode step")
    parser.add_argument("--model", default="llama3_8b", help="recipe")
    parser.add_argument("--cut", type=int, default=0, help="layers that are left of it; 0: all")
    parser.add_argument("--experts", default="fused", help="fused, sorted: the experts of a mixture")
    parser.add_argument("--tiny", action="store_true", help="two layers and a small vocabulary, to try the command")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    for on in options.on.split(","):
        batches, drafts = (map(int, given.split(",")) for given in (options.batches, options.verify))
        names = (given.split(",") for given in (options.layers, options.weights, options.experts))
        for batch, layers, weights, experts, verify in itertools.product(batches, *names, drafts):
            cell = {"batch": batch, "layers": layers, "weights": weights, "verify": verify, "experts": experts}
            kwargs = cell | {name: getattr(options, name) for name in ("context", "tiny", "model", "cut")}
            row = run_isolated("benchmarks.engine_bytes:compiled", on, kwargs)
            if options.json:
                print(json.dumps({"on": on, "format": weights} | cell | row), flush=True)
                continue
            least = row["weights"] + row["cache"]
            print(
                f"{on:9} {weights:8} batch {batch:3} {layers:7} verify {verify} {experts}: "
                f"{row['moved'] / 1e9:7.2f} GB moved, "
                f"{least / 1e9:7.2f} GB of weights and cache: "
                f"{row['moved'] / least:.3f}, a roofline of {least / row['moved']:.0%}; "
                f"{row['before'] / least:.3f} once a call; "
                f"{row['temporaries'] / 1e6:.0f} MB of temporaries; "
                f"arguments {row['arguments'] / row['planned']:.4f} of the plan's"
                + (f"; {row['cycles'] / 1e6:.2f} M cycles" if row["cycles"] else ""),
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
