"""Multi-turn rollouts: episodes of a policy with an environment, sampled by the engine turn after turn.

All episodes of a step take their first turn together, then those that go on their second, so that what is sampled does
not depend on how long an environment takes. Environments run in threads. The prefix cache of the engine holds what
earlier turns computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxllm.infer.sampling_params import SamplingParams
from jaxllm.infer.scheduling.sequence import Sequence as EngineSequence
from jaxllm.posttrain.bounded_calls import bounded_calls
from jaxllm.posttrain.environments.environment import Environment, EnvironmentFactory, Observation
from jaxllm.posttrain.environments.turn_format import TurnFormat
from jaxllm.posttrain.prompts import Prompt
from jaxllm.posttrain.rollouts import Requests, Rollout, Sampling, derived_seed
from jaxllm.text import ChatTemplate, Tokenizer


@dataclass
class _Episode:
    """Episode while it is sampled; tokens are those after the prompt, and the last turn begins at ``began``."""

    prompt: Prompt
    environment: Environment
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    began: int = 0
    turns: int = 0
    calls: int = 0
    flaws: int = 0
    reward: float = 0.0
    finish: str = ""
    failure: str = ""


class EpisodeSampler:
    """Samples multi-turn rollouts.

    Args:
        factory: creates the environment of each episode.
        tokenizer, template: of the model.
        max_tokens: most tokens after a prompt, observations included.
        max_turns: most turns of the policy in an episode.
        timeout: seconds that an environment may take for one turn; 0: any. One that takes longer is left running in its
            thread.
    """

    def __init__(
        self,
        factory: EnvironmentFactory,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        max_tokens: int,
        max_turns: int,
        timeout: float,
    ):
        self._factory, self._tokenizer = factory, tokenizer
        self._format = TurnFormat(tokenizer, template, factory())
        self._max_tokens, self._max_turns, self._timeout = max_tokens, max_turns, timeout

    def sample(self, prompts: list[Prompt], count: int, seed: int) -> Sampling[list[list[Rollout]]]:
        """``count`` episodes of each prompt; arguments as for ``rollouts.sampled``."""
        episodes = [
            _Episode(prompt, self._factory(), derived_seed(seed, place, number))
            for place, prompt in enumerate(prompts)
            for number in range(count)
        ]
        self._call(episodes, [partial(one.environment.reset, dict(one.prompt.row), one.seed) for one in episodes])
        while going := [one for one in episodes if not one.finish]:
            completions = yield self._requests(going)
            self._write(going, [sequence for (sequence,) in completions])
            self._read(going)
        rollouts = [self._rollout(one) for one in episodes]
        return [rollouts[at : at + count] for at in range(0, len(rollouts), count)]

    def _requests(self, episodes: list[_Episode]) -> Requests:
        """Requests for the next turn of each episode."""
        return [
            (
                [*one.prompt.ids, *one.tokens],
                SamplingParams(
                    max_tokens=self._max_tokens - len(one.tokens), logprobs=0, seed=derived_seed(one.seed, one.turns),
                    stop=tuple(one.environment.stop), include_stop=True,
                ),
            )
            for one in episodes
        ]  # fmt: skip

    def _write(self, episodes: list[_Episode], turns: list[EngineSequence]) -> None:
        """Appends the next turn of each episode."""
        for one, sequence in zip(episodes, turns, strict=True):
            known = len(one.prompt.ids) + len(one.tokens)
            turn = [int(token) for token in sequence.tokens[known:]]
            one.began = len(one.tokens)
            one.tokens += turn
            one.logprobs += sequence.logprobs
            one.versions += sequence.versions
            one.written += [True] * len(turn)
            one.turns += 1
            one.finish = "length" if sequence.finish == "length" else ""

    def _read(self, episodes: list[_Episode]) -> None:
        """Gives each turn to its environment, and appends the observation; a turn that was cut is the last."""
        found = self._call(episodes, [partial(one.environment.step, self._turn_text(one)) for one in episodes])
        for one, observation in zip(episodes, found, strict=True):
            if one.failure:
                continue
            if not isinstance(observation, Observation):
                one.finish, one.failure = (
                    "error",
                    f"the environment gave a {type(observation).__name__}, no Observation",
                )
                continue
            one.reward += observation.reward
            one.calls += observation.calls
            one.flaws += observation.flaws
            if observation.done or one.finish:
                one.finish = one.finish or "stop"
            elif one.turns == self._max_turns:
                one.finish = "turns"
            else:
                self._observe(one, self._format.between(observation.text, one.tokens[-1]))

    def _observe(self, episode: _Episode, tokens: Iterable[int]) -> None:
        """Appends an observation; an episode without room for it and a further token ends."""
        new = list(tokens)
        if len(episode.tokens) + len(new) >= self._max_tokens:
            episode.finish = "length"
            return
        episode.tokens += new
        episode.logprobs += [0.0] * len(new)
        episode.versions += [episode.versions[-1]] * len(new)
        episode.written += [False] * len(new)

    def _call(self, episodes: list[_Episode], functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Results of the environments' functions, in order; one that raises or is late ends its episode."""
        results = bounded_calls(functions, self._timeout)
        for one, result in zip(episodes, results, strict=True):
            if result.failure:
                one.finish, one.failure = "error", f"the environment {result.failure}"
        return [result.value for result in results]

    def _turn_text(self, episode: _Episode) -> str:
        """The last turn as text, without the token that ended it."""
        return self._tokenizer.decode(self._without_end(episode.tokens[episode.began :]), specials=True)

    def _without_end(self, tokens: list[int]) -> list[int]:
        return tokens[:-1] if tokens and tokens[-1] in self._tokenizer.stop_ids else tokens

    def _rollout(self, episode: _Episode) -> Rollout:
        return Rollout(
            episode.prompt,
            tuple(episode.tokens),
            tuple(episode.logprobs),
            tuple(episode.versions),
            self._tokenizer.decode(self._without_end(episode.tokens), specials=True),
            episode.finish,
            written=tuple(episode.written),
            turns=episode.turns,
            calls=episode.calls,
            flaws=episode.flaws,
            environment_reward=episode.reward,
            failure=episode.failure,
        )
