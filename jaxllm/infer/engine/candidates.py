"""Candidate selection: requests that select among several completions (best_of, beam search) return them at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxllm.infer.engine.beam_search import Beam, BeamSearch, length_normalised_score
from jaxllm.infer.engine.stream_output import OutputDelta, output_delta
from jaxllm.infer.sampling_params import SamplingParams
from jaxllm.infer.scheduling.sequence import Request, Sequence


@dataclass
class _RunningSearch:
    """Beam search in progress: each round is an internal request of one token for each beam.

    The prompts of a round are the beams so far, so that the prefix cache shares their pages.
    """

    request: Request
    beams: BeamSearch
    params: SamplingParams
    round: list[Request] = field(default_factory=list)
    found: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)


class CandidateSelector:
    """Selector of completions: holds output back until a request's best completions are known.

    Args:
        submit, cancel: methods of the engine.
    """

    def __init__(self, submit: Callable[..., Request], cancel: Callable[[Request], None]):
        self._submit, self._cancel = submit, cancel
        self._searches: dict[int, _RunningSearch] = {}  # by the requests of their rounds

    def select(self, deltas: list[OutputDelta]) -> list[OutputDelta]:
        """Output to return now: that of plain requests, and the best completions of requests that have ended."""
        out = []
        for delta in deltas:
            request = delta.request
            if (search := self._searches.get(request.id)) is not None:
                out += self._advance(search, delta)
            elif request.internal:
                continue  # a round of a search that was cancelled, whose tokens had landed
            elif request.params.candidates == request.params.n:
                out.append(delta)
            elif request.selected is None and all(s.finish is not None for s in request.sequences):
                out += _best(request)
        return out

    def search(self, request: Request) -> None:
        """Starts a beam search."""
        params = request.params
        beams = BeamSearch(params.beams, params.max_tokens, request.stop_ids, params.length_penalty)
        one_token = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=beams.candidates)
        self._start_round(_RunningSearch(request, beams, one_token))

    def forget(self, request: Request) -> None:
        """Cancels the beam search rounds of a cancelled request."""
        for search in {id(s): s for s in self._searches.values() if s.request is request}.values():
            for one in search.round:
                del self._searches[one.id]
                self._cancel(one)

    def owner(self, request: Request) -> Request:
        """Request that a beam search's round is a part of; any other request itself."""
        search = self._searches.get(request.id)
        return request if search is None else search.request

    def _start_round(self, search: _RunningSearch) -> None:
        """Submits a request of one token for each beam."""
        request = search.request
        same = {"salt": request.client_salt, "service": request.service, "adapter": request.adapter, "internal": True}
        search.found = {}
        search.round = [
            self._submit([*request.text, *beam.tokens], search.params, **same) for beam in search.beams.beams
        ]
        self._searches |= {request.id: search for request in search.round}

    def _advance(self, search: _RunningSearch, delta: OutputDelta) -> list[OutputDelta]:
        """Records the top tokens after one beam; after the last of a round starts the next, or returns the results."""
        search.found[delta.request.id] = delta.top[0]
        if len(search.found) < len(search.round):
            return []
        for one in search.round:
            del self._searches[one.id]
        if search.beams.advance([search.found[one.id] for one in search.round]):
            self._start_round(search)
            return []
        ended = zip(search.request.sequences, search.beams.ended, strict=False)
        return [_search_result(sequence, beam) for sequence, beam in ended]


def _search_result(sequence: Sequence, beam: Beam) -> OutputDelta:
    """Fills a sequence with a beam of an ended search."""
    many = sequence.request.params.logprobs or 0
    sequence.tokens += beam.tokens
    sequence.logprobs, sequence.top = list(beam.logprobs), [list(best[:many]) for best in beam.top]
    sequence.finish = "stop" if beam.finish == "stop" else "length"
    if sequence.detokenizer is not None:
        shown = beam.tokens[:-1] if sequence.finish == "stop" else beam.tokens
        text = "".join(sequence.detokenizer.push(token)[0] for token in shown)
        sequence.text += text + sequence.detokenizer.end()
    return _whole(sequence, sequence.number)


def _best(request: Request) -> list[OutputDelta]:
    """Selects the n best completions by length-normalised score (best_of)."""
    penalty = request.params.length_penalty

    def score(sequence: Sequence) -> float:
        return length_normalised_score(sum(sequence.logprobs), len(sequence.completion), penalty)

    request.selected = sorted(request.sequences, key=lambda s: -score(s))[: request.params.n]
    return [_whole(sequence, number) for number, sequence in enumerate(request.selected)]


def _whole(sequence: Sequence, number: int) -> OutputDelta:
    """Delta with all of a completion that was held back."""
    tokens = tuple(sequence.completion)
    sequence.echo = ""  # already part of the text
    return dataclasses.replace(output_delta(sequence, tokens, sequence.text, sequence.finish), number=number)
