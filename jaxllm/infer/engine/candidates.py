"""Requests that choose among several texts give nothing out before all of them have ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxllm.infer.engine.beam_search import Beam, BeamSearch, score
from jaxllm.infer.engine.sequence import Request, Sequence
from jaxllm.infer.engine.stream_output import Piece, piece_of
from jaxllm.infer.sampling_params import SamplingParams


@dataclass
class _Search:
    """A beam search on its way: each round a request of one token for each beam.

    Their prompts are what the beams have so far, so pages are found by their hashes, and shared.
    """

    request: Request
    beams: BeamSearch
    asked: SamplingParams
    round: list[Request] = field(default_factory=list)
    found: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)


class Chooser:
    """Keeps back what is not chosen yet.

    Args:
        submit, cancel: of the engine.
    """

    def __init__(self, submit: Callable[..., Request], cancel: Callable[[Request], None]):
        self._submit, self._cancel = submit, cancel
        self._searches: dict[int, _Search] = {}  # by the requests of their rounds

    def choose(self, pieces: list[Piece]) -> list[Piece]:
        """What is given out of these."""
        out = []
        for piece in pieces:
            request = piece.request
            if (search := self._searches.get(request.id)) is not None:
                out += self._advance(search, piece)
            elif request.params.made == request.params.n:
                out.append(piece)
            elif request.chosen is None and all(s.finish is not None for s in request.sequences):
                out += _best(request)
        return out

    def search(self, request: Request) -> None:
        """Begins a beam search."""
        params = request.params
        beams = BeamSearch(params.beams, params.max_tokens, request.stop_ids, params.length_penalty)
        asked = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=beams.candidates)
        self._begin(_Search(request, beams, asked))

    def forget(self, request: Request) -> None:
        """Ends the rounds of a request that is cancelled."""
        for search in {id(s): s for s in self._searches.values() if s.request is request}.values():
            for one in search.round:
                del self._searches[one.id]
                self._cancel(one)

    def _begin(self, search: _Search) -> None:
        whole, salt = search.request.prompt, search.request.salt.decode()
        search.found = {}
        search.round = [
            self._submit([*whole, *beam.tokens], search.asked, salt=salt, service=search.request.service, internal=True)
            for beam in search.beams.beams
        ]
        self._searches |= {request.id: search for request in search.round}

    def _advance(self, search: _Search, piece: Piece) -> list[Piece]:
        search.found[piece.request.id] = piece.top[0]
        if len(search.found) < len(search.round):
            return []
        for one in search.round:
            del self._searches[one.id]
        if search.beams.advance([search.found[one.id] for one in search.round]):
            self._begin(search)
            return []
        ended = zip(search.request.sequences, search.beams.ended, strict=False)
        return [_found(sequence, beam) for sequence, beam in ended]


def _found(sequence: Sequence, beam: Beam) -> Piece:
    """A result of a search."""
    many = sequence.request.params.logprobs or 0
    sequence.tokens += beam.tokens
    sequence.logprobs, sequence.top = list(beam.logprobs), [list(best[:many]) for best in beam.top]
    sequence.finish = "stop" if beam.finish == "stop" else "length"
    if sequence.reader is not None:
        shown = beam.tokens[:-1] if sequence.finish == "stop" else beam.tokens
        sequence.text += "".join(sequence.reader.push(token)[0] for token in shown) + sequence.reader.end()
    return _whole(sequence, sequence.number)


def _best(request: Request) -> list[Piece]:
    first, penalty = len(request.prompt), request.params.length_penalty
    ranked = sorted(request.sequences, key=lambda s: -score(sum(s.logprobs), len(s.tokens) - first, penalty))
    request.chosen = ranked[: request.params.n]
    return [_whole(sequence, number) for number, sequence in enumerate(request.chosen)]


def _whole(sequence: Sequence, number: int) -> Piece:
    """All of a text that was kept back."""
    tokens = tuple(sequence.tokens[len(sequence.request.prompt) :])
    sequence.echo = ""  # the text begins with it
    return dataclasses.replace(piece_of(sequence, tokens, sequence.text, sequence.finish), number=number)
