"""Simulated runner: pages hold the tokens written to them, and a step checks that it reads its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxllm.infer import EngineConfig
from jaxllm.infer.runner.paged_cache import LayerGroup
from jaxllm.infer.runner.runner_protocol import RunnerSpec
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.infer.scheduling.page_allocator import NO_PAGE
from tests.infer.engines import LONGEST, VOCAB
from tests.infer.stub_runner import StubRunner


class PaperRunner(StubRunner):
    """Does what ``ModelRunner`` does, for a model whose next token is a hash of all before it."""

    def __init__(self, config: EngineConfig, groups: tuple[LayerGroup, ...], pages: int):
        size = config.page_size or LONGEST
        self.config = config
        super().__init__(RunnerSpec(groups, (pages,) * len(groups), size, -(-LONGEST // size), LONGEST))
        self.pools = [np.full((pages, size), NO_PAGE) for _ in groups]
        self.last = np.zeros(config.max_sequences, np.int64)

    def choose(self, requests: int, tokens: int, *, decode: bool, full: bool) -> StepShape:
        config = self.config
        sizes = config.decode_buckets if decode else config.prompt_buckets
        number = next(size for size in sizes if size >= (requests if decode else tokens))
        return StepShape(
            number, min(number, config.max_sequences), decode, full, config.max_sequences, self.spec.columns,
            len(self.pools), config.decode_steps, 1, "float32",
        )  # fmt: skip

    def run(self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None = None) -> np.ndarray:
        x = shape.inputs.views(packed[0])
        out = np.zeros(shape.outputs.size, np.int32)
        made = shape.outputs.views(out)["tokens"]
        for group, pool in enumerate(self.pools):
            for old, new in x["copies"][group][: x["copied"][group]]:
                pool[new] = pool[old]
        for row in range(shape.requests):
            if (slot := x["slots"][row]) == shape.slots:
                continue
            begin, end = x["starts"][row : row + 2]
            tokens = [int(t) if t >= 0 else int(self.last[slot]) for t in x["tokens"][begin:end]]
            for step in range(int(x["steps"]) if shape.decode else 1):
                kv_len = int(x["kv_lens"][row]) + step
                fresh = tokens if step == 0 else [int(self.last[slot])]
                text = self._write_and_read(x["tables"][:, row], kv_len, fresh)
                self.last[slot] = made[step, row] = self._following(text)
        return out[None]

    def _write_and_read(self, tables: np.ndarray, kv_len: int, tokens: list[int]) -> list[int | None]:
        """Tokens that a request can attend to: with windows only those within reach; all groups agree on them."""
        size = self.spec.page_size
        seen: list[int | None] = [None] * kv_len
        for group, (pool, table) in enumerate(zip(self.pools, tables, strict=True)):
            for i, token in enumerate(tokens):
                at = kv_len - len(tokens) + i
                pool[table[at // size], at % size] = token
            window = self.spec.groups[group].window
            first = 0 if window is None else max(0, kv_len - len(tokens) - window + 1)
            for at in range(first, kv_len):
                found = int(pool[table[at // size], at % size])
                assert found != NO_PAGE, "a slot that nobody has written is read"
                assert seen[at] in (None, found), "two groups of layers hold different tokens"
                seen[at] = found
        return seen

    def read(self, replica: int, group: int, pages: list[int]) -> np.ndarray:
        return self.pools[group][pages].copy()

    def write(self, replica: int, group: int, pages: list[int], content: Any) -> None:
        self.pools[group][pages] = content

    def check(self, prompt: list[int], tokens: list[int]) -> None:
        """Every token made is the one that follows from those before it."""
        for end in range(len(prompt), len(tokens)):
            assert tokens[end] == self._following(list(tokens[:end]))

    def _following(self, text: list[int | None]) -> int:
        """The next token: of all before it, or of as many as the largest window reaches."""
        windows = [group.window for group in self.spec.groups]
        value = 17
        for token in text if None in windows else text[-max(w for w in windows if w is not None) :]:
            assert token is not None
            value = (value * 31 + token + 7) % 1_000_003
        return value % VOCAB
