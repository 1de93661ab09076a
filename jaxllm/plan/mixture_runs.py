"""Small runs of a mixture search: a tiny model is trained on each mixture, and its loss on the target text is kept.

All runs of a search share seed, initial parameters and schedule, so their losses differ by the mixture alone. A
finished run is kept in the cache under the hash of everything that made it: a search that is started again repeats
nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import config as settings
from jaxllm.data.config import DataConfig, SourceConfig
from jaxllm.data.dataset import HeldoutDataset, make_heldout
from jaxllm.data.loader import PACKINGS, load_dataset
from jaxllm.data.mixture import MixtureDataset, MixtureSource
from jaxllm.data.token_files import TokenDocuments
from jaxllm.files import DataError, digest, read_json, write_json
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig, functional
from jaxllm.optim import OptimConfig, ScheduleConfig, optimizer, schedule
from jaxllm.train import RunConfig, TrainState, loss_sums, train_step, value_and_grad

NAME = "mixture-run-1"  # it must change if the result of a small run ever changes
HELDOUT_TOKENS = 50_000


def small_run(vocab_size: int, steps: int, *, seed: int = 0) -> RunConfig:
    """Configuration of a small run: two blocks of width 64, 8 rows of 128 tokens a step, a WSD schedule."""
    block = BlockConfig(AttentionConfig(heads=2, kv_heads=2, head_dim=32, qk_norm="head"), MlpConfig(hidden=192))
    return RunConfig(
        model=DecoderConfig(vocab_size=vocab_size, embed_dim=64, layers=2, pattern=(block,), tied=True),
        data=DataConfig(seq_len=128, batch_size=8),
        optim=OptimConfig(schedule=ScheduleConfig(kind="wsd", peak=5e-3, warmup=0.05, decay=0.5, floor=0.02)),
        steps=steps,
        seed=seed,
    )


@dataclass(frozen=True, eq=False)
class MixtureTask:
    """Opened data of a mixture search.

    Attributes:
        sources: tokenised and packed, in the order of the shares.
        target: tokens of the objective, at most ``HELDOUT_TOKENS`` of them.
        heldout: the same as an evaluation set.
        vocab_size: of the tokenizer.
    """

    sources: tuple[MixtureSource, ...]
    target: TokenDocuments
    heldout: HeldoutDataset
    vocab_size: int

    @property
    def names(self) -> list[str]:
        """Names of the sources."""
        return [one.name for one in self.sources]


def open_task(
    sources: Sequence[SourceConfig],
    objective: SourceConfig,
    *,
    tokenizer: str = "byte",
    seq_len: int = 128,
    batch_size: int = 8,
    cache_dir: str = "",
) -> MixtureTask:
    """Opens and tokenises the sources and the objective of a mixture search.

    Args:
        sources: their weights are not used.
        objective: text that the mixture should be good for; of the bundled corpus, its held-out part.
        tokenizer, cache_dir: as in ``DataConfig``.
        seq_len, batch_size: of the small runs.

    Raises:
        DataError: fewer than two sources, or data that cannot be used.
    """
    if len(sources) < 2:
        raise DataError(f"a mixture is chosen among at least two sources; there {'is' if sources else 'are'} "
                        f"{len(sources)}. Give --sources NAME=PATH NAME=PATH ...")  # fmt: skip
    common: dict[str, Any] = {
        "tokenizer": tokenizer,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "cache_dir": cache_dir,
    }
    mixed = load_dataset(DataConfig(mixture=tuple(sources), heldout_fraction=0.0, **common))
    # A mixture of one, because the bundled corpus alone is refused with a heldout_fraction.
    aimed = load_dataset(DataConfig(mixture=(objective,), heldout_fraction=0.0, **common))
    assert isinstance(mixed.train, MixtureDataset)
    assert isinstance(aimed.train, MixtureDataset)
    parts = aimed.heldout.parts if aimed.heldout is not None else [(aimed.train.sources[0].documents, None)]
    target = first_tokens(parts[0][0], HELDOUT_TOKENS)
    plan = PACKINGS["concat"](target.starts, target.lengths, seq_len)
    heldout = make_heldout([(target, plan)], batch_size, aimed.tokenizer)
    return MixtureTask(mixed.train.sources, target, heldout, mixed.tokenizer.vocab_size)


def first_tokens(documents: TokenDocuments, tokens: int, seed: int = 0) -> TokenDocuments:
    """Documents in an order drawn by ``seed``, of which the last is truncated, with at most so many tokens together."""
    order = np.random.default_rng(seed).permutation(len(documents.starts))
    ends = np.cumsum(documents.lengths[order])
    kept = order[: int(np.searchsorted(ends, tokens)) + 1]
    lengths = documents.lengths[kept].copy()
    lengths[-1] -= max(0, int(lengths.sum()) - tokens)
    chosen = digest([documents.content_hash, kept.tolist(), lengths.tolist()])
    return dataclasses.replace(documents, starts=documents.starts[kept], lengths=lengths, content_hash=chosen)


class MixtureRuns:
    """Small runs on mixtures of a task's sources.

    Args:
        task: the data.
        folder: where results of finished runs are kept; None: in memory only.
        seed: of parameters and data order, the same for all runs.
        configure: ``(vocab_size, steps) -> RunConfig`` of a run; None: ``small_run``. Its data settings give sequence
            length and batch size; its techniques of the step are not supported, only model, optimizer and schedule.
    """

    def __init__(
        self,
        task: MixtureTask,
        folder: Path | None,
        *,
        seed: int = 0,
        configure: Callable[[int, int], RunConfig] | None = None,
    ):
        self.task = task
        self._folder = folder
        self._configure = configure or functools.partial(small_run, seed=seed)
        self._known: dict[str, float] = {}
        self._programs: dict[int, Any] = {}
        self._evaluate: Any = None
        self._config = self._configure(task.vocab_size, 1)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a batch."""
        return self._config.data.batch_size * self._config.data.seq_len

    def size(self, tokens: float) -> int:
        """Tokens of a run of about so many: whole steps."""
        return max(1, round(tokens / self.tokens_per_step)) * self.tokens_per_step

    def key(self, shares: Sequence[float], tokens: int) -> str:
        """Hash of everything that makes the result of a run."""
        config = self._configure(self.task.vocab_size, tokens // self.tokens_per_step)
        sources = [[one.documents.content_hash, share] for one, share in zip(self.task.sources, shares, strict=True)]
        names = self.task.names  # they are part of the seeds of the sources' shuffles
        return digest([NAME, settings.to_dict(config), names, sources, self.task.target.content_hash])

    def finished(self, shares: Sequence[float], tokens: int) -> bool:
        """Whether the run has been done before."""
        return self._read(self.key(shares, tokens)) is not None

    def loss(self, shares: Sequence[float], tokens: int) -> float:
        """Loss on the objective, nats per token, after training on ``tokens`` tokens of a mixture.

        Args:
            shares: of the sources, with the sum 1; exact decimals, as a ``SourceConfig.weight``. 0 leaves a source out.
            tokens: a whole number of steps (``size``).

        Raises:
            DataError: the loss is not finite.
        """
        key = self.key(shares, tokens)
        if (known := self._read(key)) is not None:
            return known
        found = self._train(shares, tokens // self.tokens_per_step)
        if not np.isfinite(found):
            raise DataError(f"the small run on the shares {list(shares)} has the loss {found}; lower its learning rate")
        self._known[key] = found
        if self._folder is not None:
            facts = {"loss": found, "tokens": tokens, "shares": dict(zip(self.task.names, shares, strict=True))}
            write_json(self._folder / f"{key}.json", facts)
        return found

    def _read(self, key: str) -> float | None:
        if key not in self._known and self._folder is not None and (path := self._folder / f"{key}.json").exists():
            self._known[key] = float(read_json(path)["loss"])
        return self._known.get(key)

    def mixture(self, shares: Sequence[float]) -> MixtureDataset:
        """Training data of a mixture; sources with the share 0 are left out."""
        pairs = zip(self.task.sources, shares, strict=True)
        kept = tuple(dataclasses.replace(one, weight=share) for one, share in pairs if share > 0)
        return MixtureDataset(kept, self._config.data.batch_size, self._config.seed, {})

    def _train(self, shares: Sequence[float], steps: int) -> float:
        start, step = self._program(steps)
        state, data = start(), self.mixture(shares)
        for number in range(steps):
            state, _ = step(state, data.batch_at(number))
        sums = [self._sums()(state.params, batch) for batch in self.task.heldout]
        return float(sum(float(one.nll) for one in sums) / sum(float(one.count) for one in sums))

    def _program(self, steps: int) -> Any:
        """(initial state, step) of runs of so many steps, compiled once."""
        if steps not in self._programs:
            config = self._configure(self.task.vocab_size, steps)
            model = functional(config.model)
            transform = optimizer(config.optim, steps, model.logical_axes())

            @jax.jit
            def start() -> TrainState:
                key, run_key = jax.random.split(jax.random.key(config.seed))
                params = model.init(key)
                return TrainState(params, transform.init(params), jnp.int32(0), run_key)

            own = train_step(value_and_grad(model), transform, schedule(config.optim.schedule, steps))
            self._programs[steps] = start, jax.jit(own, donate_argnums=0)
        return self._programs[steps]

    def _sums(self) -> Any:
        if self._evaluate is None:
            model = functional(self._config.model)
            self._evaluate = jax.jit(lambda params, batch: loss_sums(model, params, batch))
        return self._evaluate
