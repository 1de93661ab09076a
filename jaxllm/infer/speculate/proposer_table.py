"""Proposer table: the proposers of speculative decoding by the names that ``--speculate`` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.scheduling.proposer import AnyProposer
from jaxllm.infer.speculate.draft_argument import load_draft, parse_draft
from jaxllm.infer.speculate.draft_head import load_head
from jaxllm.infer.speculate.draft_model import ServedModel
from jaxllm.infer.speculate.head_draft import HeadProposer, with_features
from jaxllm.infer.speculate.mtp_module import load_module_proposer, parse_nothing
from jaxllm.infer.speculate.ngram import NgramProposer, parse_longest
from jaxllm.infer.speculate.self_draft import SelfDraftProposer, parse_kept
from jaxllm.infer.speculate.tree_draft import load_tree_draft, parse_tree, with_trees


@dataclass(frozen=True)
class ProposerKind:
    """Row of the proposer table.

    Attributes:
        usage: how it is named, such as ``ngram[:N]``.
        parse: reads and checks the text after the colon, before any model is loaded; raises ValueError.
        make: makes the proposer of what ``parse`` returned and the served model.
        configure: changes a configuration as the proposer needs it; None: nothing to change.
        sets_tokens: the argument says how many draft tokens there are.
    """

    usage: str
    parse: Callable[[str], Any]
    make: Callable[[Any, ServedModel], AnyProposer]
    configure: Callable[[EngineConfig, Any], EngineConfig] | None = None
    sets_tokens: bool = False


PROPOSERS: dict[str, ProposerKind] = {
    "ngram": ProposerKind("ngram[:N]", parse_longest, lambda longest, served: NgramProposer(longest)),
    "draft": ProposerKind("draft:MODEL[,parallel=N][,devices=A-B]", parse_draft, load_draft),
    "tree": ProposerKind("tree:MODEL,BUDGET", parse_tree, load_tree_draft, with_trees, sets_tokens=True),
    "head": ProposerKind("head:DIR", load_head, HeadProposer, with_features),
    "mtp": ProposerKind("mtp", parse_nothing, load_module_proposer, with_features),
    "self": ProposerKind("self:LAYERS|FILE", parse_kept, SelfDraftProposer),
}
"""Proposers by name."""


def proposer_kind(speculate: str) -> tuple[ProposerKind, Any]:
    """Row of ``EngineConfig.speculate`` and its parsed argument; no model is loaded.

    Raises:
        ValueError: there is no such proposer, or its argument is not legal.
    """
    name, _, text = speculate.partition(":")
    if name not in PROPOSERS:
        legal = ", ".join(kind.usage for kind in PROPOSERS.values())
        raise ValueError(f"speculate = {speculate!r}: there is no proposer {name!r}; legal: {legal}.")
    kind = PROPOSERS[name]
    try:
        return kind, kind.parse(text)
    except ValueError as error:
        raise ValueError(f"speculate = {speculate!r}: {error}") from None


def with_speculation(
    config: EngineConfig, speculate: str | None, tokens: int | None = None, runs: int = 1
) -> EngineConfig:
    """Configuration of an engine that speculates; the same where ``speculate`` is None.

    Args:
        config: configuration without speculation.
        speculate: see ``EngineConfig``.
        tokens: number of draft tokens of a sequence in a step, fixed; None: as the configuration says.
        runs: see ``EngineConfig.draft_runs``.

    Raises:
        ValueError: there is no such proposer, or it does not go with the configuration.
    """
    if speculate is None:
        if tokens is not None:
            raise ValueError(f"speculate_tokens = {tokens} without speculate: give a proposer, such as 'ngram'.")
        if runs != 1:
            raise ValueError(f"speculate_runs = {runs} without speculate: give a proposer, such as 'ngram'.")
        return config
    if tokens is not None and tokens < 1:
        raise ValueError(f"speculate_tokens = {tokens}; give 1 or more, or leave speculate out.")
    kind, _ = proposer_kind(speculate)
    if tokens is None:
        return configured(replace(config, speculate=speculate, draft_runs=runs))
    if kind.sets_tokens:
        raise ValueError(
            f"speculate_tokens = {tokens} with speculate = {speculate!r}, whose argument says how many tokens: "
            f"{kind.usage}. Leave speculate_tokens out."
        )
    fixed = replace(config, speculate=speculate, verify_tokens=tokens, draft_length="fixed", draft_runs=runs)
    return configured(fixed)


def configured(config: EngineConfig) -> EngineConfig:
    """Configuration as the proposer that it names needs it.

    Raises:
        ValueError: see ``proposer_kind``; or the proposer does not go with the configuration.
    """
    if config.speculate is None:
        return config
    kind, argument = proposer_kind(config.speculate)
    return config if kind.configure is None else kind.configure(config, argument)


def make_proposer(served: ServedModel) -> AnyProposer:
    """Proposer that the ``speculate`` of a served model's configuration names.

    Raises:
        ValueError: see ``proposer_kind``; or the proposer does not go with the model.
    """
    assert served.config.speculate is not None
    kind, argument = proposer_kind(served.config.speculate)
    return kind.make(argument, served)
