"""Active slices of ReLU layers: what is served is the dense layer of the predicted slices, and little of it is read."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.infer import EngineConfig, SamplingParams
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.streaming.experts import expert_files
from jaxllm.infer.streaming.experts.active_slices import ActiveSlices, activity, learn
from jaxllm.infer.streaming.experts.expert_schedule import SCHEDULES
from jaxllm.infer.streaming.experts.mlp_slices import SlicedLayers, cut, sliced_model
from jaxllm.infer.streaming.layer_store import LoadedLayers, units_of
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import StreamedWeights, WeightPlacement
from jaxllm.infer.streaming.weight_file import file_state, read_bytes, write_arrays
from jaxllm.models import Segments, functional, unstack_layers
from tests import quick
from tests.infer import engines
from tests.proofs.engine.programs import Compilations
from tests.proofs.harness import proof
from tests.proofs.offload import trained_mixture
from tests.proofs.offload.streamed_weights import WAYS, drawn

SLICES, SLOTS, GENERATED, BLOCK = 384, 192, 48, 4096


def drawn_predictors(rng: np.random.Generator, model: str, slices: int) -> ActiveSlices:
    """Predictors at random, of which a third of the slices are active, and in one layer none ever is."""
    config = engines.model_of(model, "float64")
    found = {}
    for layer in range(config.layers):
        bias = np.full(slices, -1e9) if layer == 1 else rng.normal(size=slices) - 0.5
        found[layer] = rng.normal(size=(config.embed_dim, slices)) / config.embed_dim**0.5, bias
    return ActiveSlices(found)


def masked(params: Any, active: ActiveSlices, slices: int) -> Any:
    """Parameters of the sliced model, layers apart."""
    apart, first, segments = unstack_layers(params), 0, {}
    for s, repeats in apart["segments"].items():
        each = []
        for repeat in repeats:
            blocks = {
                b: x | {"mlp": cut(x["mlp"], slices, active.weights(first + int(b), np.asarray(x["mlp"]["gate"])))}
                for b, x in repeat.items()
            }
            first += len(repeat)
            each.append(jax.tree.map(jnp.asarray, blocks))
        segments[s] = tuple(each)
    return apart | {"segments": segments}


@proof(
    "offload",
    count=40,
    sample=1,
    float64=True,
    bound={"logprobs": 1e-12, "absolute": 1e-9},
    counts=("wanted", "of all"),
)
def active_slices_are_dense_ones(seed: int) -> dict[str, float]:
    """Random traffic over ReLU models whose slices are active by drawn predictors, any number of which have slots, the
    others on the host or in files, copied or computed by the host's processor: log-probabilities of the training
    forward in which the slices that are not predicted are left out. Fewer are wanted than there are.

    Norms of what few slices give can magnify rounding: where a change of weights in the last bit changes a
    log-probability of the training forward by more than 1e-14, the error is counted as so many times smaller;
    "absolute": as it is.
    """
    rng = np.random.default_rng(seed)
    model, way = str(rng.choice(list(engines.RELU))), str(rng.choice([way for way in WAYS if way != "invariant"]))
    config, architecture = engines.ENGINES[way], engines.model_of(model, "float64")
    hidden = architecture.blocks[0].mlp.hidden
    slices = int(rng.choice([n for n in range(2, 9) if hidden % n == 0]))
    active = drawn_predictors(rng, model, slices)
    with tempfile.TemporaryDirectory() as folder:
        units = sum(repeats for _, repeats in architecture.segments)
        placement = dataclasses.replace(
            drawn(rng, units + 1, Path(folder)),
            expert_slots=int(rng.integers(1, slices + 1)),
            absent=str(rng.choice(list(SCHEDULES))),  # type: ignore[arg-type]
        )
        if placement.disk is not None and rng.random() < 0.7:
            placement = dataclasses.replace(placement, expert_host_bytes=int(rng.choice([0, 3000])))
        engine = engines.build(config, model, "float64", placement=placement, slices=slices, active=active)
        counter = Compilations()
        with counter:
            made = engines.serve(engine, engines.traffic(rng, config, 5))
        assert not counter.names
        assert isinstance(engine.runner, StreamedRunner)
        stage = engine.runner.experts
        assert stage is not None
        wanted, every = stage.counts.wanted, slices * architecture.layers * engine.metrics.steps
        assert 0 < wanted < every
        engine.runner.close()
    run = forward_of(model, slices)
    params = masked(engines.params_of(model, "float64"), active, slices)
    nudged = jax.tree.map(lambda x: x * (1 + np.finfo(np.float64).eps * rng.choice([-1, 1], x.shape)), params)
    worst = absolute = 0.0
    for request in made:
        for sequence in request.sequences:
            tokens = [*sequence.tokens]
            padded = np.zeros((1, engines.LONGEST), np.int32)
            padded[0, : len(tokens)] = tokens
            expected, moved = (np.asarray(run(of, jnp.asarray(padded))) for of in (params, nudged))
            magnified = np.maximum(1.0, np.abs(moved - expected) / 1e-14)
            begin = len(tokens) - len(sequence.logprobs)
            for at, logprob in enumerate(sequence.logprobs, begin):
                place = at - 1, tokens[at]
                error = abs(float(expected[place]) - logprob)
                worst, absolute = max(worst, error / float(magnified[place])), max(absolute, error)
    return {"logprobs": worst, "absolute": absolute, "wanted": float(wanted), "of all": float(every)}


@functools.cache
def forward_of(model: str, slices: int) -> Any:
    made = sliced_model(functional(engines.model_of(model, "float64")), slices, active=True)
    positions = jnp.arange(engines.LONGEST, dtype=jnp.int32)[None]
    return quick.jit(lambda p, t: jax.nn.log_softmax(made.head(p, made.forward(p, t, positions, Segments())[0]))[0])


DENSE = dataclasses.replace(
    trained_mixture.DENSE,
    pattern=tuple(
        dataclasses.replace(b, mlp=dataclasses.replace(b.mlp, activation="relu")) for b in trained_mixture.DENSE.pattern
    ),
)


@proof(
    "offload",
    cases=[0, 1, 2],
    sample=0,
    bound={"nats lost": 0.01, "bytes of naive": 0.35, "blocks of unbundled": 0.5},
    counts=("active", "taken", "hits"),
)
def active_slices_of_a_trained_model(seed: int) -> dict[str, float]:
    """A ReLU model of bytes, trained on the bundled text, in slices of one unit: what the predictors, learned from
    other text, lose on held-out text; and the bytes that decoding one sequence copies to slots for half of them,
    against copying all layers in every step. "blocks of unbundled": blocks of 4 KiB that its reads of files touch,
    against those that reads of the same rows and columns touch in files whose three matrices are apart, of the same
    bytes.
    """
    model, params = functional(DENSE), trained_mixture.trained(seed, DENSE)
    layers, ends = LoadedLayers(params), {name: x for name, x in params.items() if name != "segments"}
    rows = trained_mixture.held_out(96, 64)
    active = learn(model, ends, layers, rows[64:], SLICES, 0.995)
    sliced = sliced_model(model, SLICES, active=True)
    dense_loss = trained_mixture.held_out_loss(model, 64)(params)
    lost = trained_mixture.held_out_loss(sliced, 64)(masked(params, active, SLICES)) - dense_loss
    shares = [
        (active_share(gate), (h @ active.layers[n][0] + active.layers[n][1] > 0).mean())
        for n, h, gate, _ in activity(model, ends, layers, rows[:16])
    ]
    config = EngineConfig(
        max_sequences=1, max_batched_tokens=16, max_len=160, layer_window=1, samplers=("plain",), buckets=(1, 16)
    )
    reads = FileReads()
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(expert_files, "read_bytes", reads.read):
        placement = WeightPlacement(
            1, 99, 0, Path(folder), expert_slots=SLOTS, ahead="none", expert_host_bytes=0
        )  # fmt: skip
        weights = StreamedWeights.of(sliced, ends, SlicedLayers(layers, DENSE, SLICES, active), placement)
        engine = Engine.of(sliced, weights, config, vocab_size=256)
        request = engine.submit(rows[0][:16].tolist(), SamplingParams(max_tokens=GENERATED, temperature=0.7, seed=seed))
        while len(request.sequences[0].tokens) < 17:
            engine.step()
        assert isinstance(engine.runner, StreamedRunner)
        stage, before = engine.runner.experts, engine.metrics.steps
        assert stage is not None
        counts, loads, wanted, hits = stage.counts, stage.counts.loads, stage.counts.wanted, stage.counts.hits
        while engine.busy:
            engine.step()
        every = SLICES * DENSE.layers * (engine.metrics.steps - before)
        engine.runner.close()
        assert len(reads.done) == counts.loads > 0
        apart = unbundled(reads, layers, Path(folder))
    return {
        "nats lost": lost,
        "bytes of naive": (counts.loads - loads) / every,
        "blocks of unbundled": reads.blocks / apart.blocks,
        "active": float(np.mean([one for one, _ in shares])),
        "taken": float(np.mean([one for _, one in shares])),
        "hits": (counts.hits - hits) / (counts.wanted - wanted),
    }


def active_share(gate: np.ndarray) -> float:
    """Share of the slices of tokens that have an active unit."""
    return float((gate > 0).reshape(len(gate), SLICES, -1).any(-1).mean())


class FileReads:
    """Reads of files of experts, with their offsets.

    Attributes:
        done: file, offset and bytes of each.
    """

    def __init__(self) -> None:
        self.done: list[tuple[Path, int, np.ndarray]] = []

    def read(
        self, path: Path, state: Any, what: str, checksum: int | None, begin: int = 0, size: int | None = None
    ) -> np.ndarray:
        """See ``read_bytes``."""
        found = read_bytes(path, state, what, checksum, begin, size)
        self.done.append((path, begin, found))
        return found

    @property
    def blocks(self) -> int:
        """Blocks of a disk that the reads touch."""
        return sum((begin + len(found) - 1) // BLOCK - begin // BLOCK + 1 for _, begin, found in self.done)


def unbundled(reads: FileReads, layers: LoadedLayers, folder: Path) -> FileReads:
    """The same slices of one unit, read from files that have all rows of one matrix before those of the next."""
    host, found = jax.devices("cpu")[0], FileReads()
    for unit in units_of(DENSE.segments):
        mlp = layers.read(unit, host)["0"]["mlp"]
        # In the order of the arrays in a file, and what a unit has of each of them in one row.
        matrices = [np.asarray(mlp["down"]), np.asarray(mlp["gate"]).T, np.asarray(mlp["up"]).T]
        write_arrays(path := folder / f"unbundled-{unit.first}.bin", [matrices])
        row = matrices[0].shape[1] * matrices[0].itemsize
        for file, begin, bundle in reads.done:
            if file.name != f"experts-{unit.first:04d}.bin":
                continue
            number = begin // len(bundle)
            rows = [
                found.read(path, file_state(path), "rows", None, (m * SLICES + number) * row, row) for m in range(3)
            ]
            assert np.array_equal(np.concatenate(rows), bundle)
    assert len(found.done) == 3 * len(reads.done)
    return found
