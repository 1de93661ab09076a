"""Turn format: the tokens between two turns of a policy, which hold an environment's observation.

With a chat template they are what the template writes from the end of one assistant message to the beginning of the
next; without one, the observation as it is. Turns themselves stay the tokens that the policy sampled: a transcript is
never rendered again, so that log-probabilities belong to the tokens that were sampled.
"""

from __future__ import annotations

from functools import cached_property

from jaxllm.files import DataError
from jaxllm.posttrain.environments.environment import Environment
from jaxllm.text import ChatTemplate, Tokenizer
from jaxllm.text.chat_template.chat_template import TemplateError

_TURN, _OBSERVATION = "jaxllm-turn-9c1e", "jaxllm-observation-9c1e"


class TurnFormat:
    """Format of the turns of a model's conversations with an environment.

    Args:
        tokenizer: of the model.
        template: its chat template; None: a transcript is plain text.
        environment: what the policy talks to.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, environment: Environment):
        self._tokenizer, self._template, self._environment = tokenizer, template, environment

    def between(self, observation: str, last: int) -> tuple[int, ...]:
        """Tokens between two turns.

        Args:
            observation: text, in which names of special tokens are text.
            last: last token of the turn before; not repeated if it is the token that ends a message.
        """
        before, after = self._around
        said = [int(i) for i in self._tokenizer.encode(observation)]
        return (*(before[1:] if before and before[0] == last else before), *said, *after)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Tokens that the template writes before and after an observation."""
        if self._template is None:
            return [], []
        failure: TemplateError | None = None
        for role in dict.fromkeys((self._environment.role, "user")):  # many templates know no other roles
            messages = [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": _TURN},
                {"role": role, "content": _OBSERVATION},
            ]
            try:
                text = self._template.render(messages, list(self._environment.tools) or None)
            except TemplateError as error:
                failure = error
                continue
            before, found, after = text.rpartition(_TURN)[2].partition(_OBSERVATION)
            if found:
                return self._encode(before), self._encode(after)
        why = f": {failure}" if failure else ", since it leaves out what an environment says"
        raise DataError(f"the model's chat template has no conversations with an environment{why}")

    def _encode(self, text: str) -> list[int]:
        return [int(i) for i in self._tokenizer.encode(text, specials=True)]
