"""Guesses by counting: how a sequence, and the recent outputs of others, went on behind the longest context known of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import NamedTuple

from nanoengine.speculation.suffix_automaton import ROOT, SuffixAutomaton

DEPTH = 24
CONTEXT = DEPTH - 1  # the longest context: with the token behind it, it is still counted
LEAST_CONTEXT = 2
MOST_CONTINUATIONS = 32  # a context with more of them tells nothing, and takes long to look through
SEPARATOR = -1  # stands behind each output; no token
DOUBT = 2  # fits prose and code: a context of 2 tokens that was there once goes on the same in half the cases


class SuffixProposer:
    """Guesses along the likeliest continuations of the longest context, in the sequence itself or in recent outputs of others.

    A guess goes on while it is likely enough to come true as a whole; of several, the one with the most tokens expected
    to come true is made. Memory: about 0.45 KB (0.7 KB at worst) for each token of the sequences that are still running, and for
    each of `max_tokens * max_salts`, which makes 60 MB of recent outputs by default.

    Args:
        least_likelihood: of all tokens of a guess together, above 0 and at most 1. A lower one makes longer guesses.
        max_tokens: of recent outputs that are kept for one cache salt; 2 * DEPTH or more. The older half of more goes.
        max_salts: cache salts that recent outputs are kept for. When there are more, the one goes that was not used for longest.

    Source: the idea is that of SuffixDecoding (Oliaro et al., 2024), arXiv 2411.04975, which has suffix trees.
    """

    def __init__(self, least_likelihood: float = 0.2, max_tokens: int = 32_768, max_salts: int = 4):
        self.least_likelihood = least_likelihood
        self.max_tokens = max_tokens
        self.max_salts = max_salts
        self._outputs: OrderedDict[str, RecentOutputs] = OrderedDict()  # the salt that was used last is the last

    def begin(self, prompt: Seq[int], cache_salt: str) -> SuffixSequenceProposer:
        if cache_salt in self._outputs:
            self._outputs.move_to_end(cache_salt)
        own = SuffixAutomaton(DEPTH)
        for token in prompt:
            own.append(token)
        return SuffixSequenceProposer(self, own, cache_salt)

    def generations(self, cache_salt: str) -> tuple[SuffixAutomaton, ...]:
        """What recent outputs with this salt have said."""
        outputs = self._outputs.get(cache_salt)
        return () if outputs is None else outputs.generations

    def keep(self, output: Seq[int], cache_salt: str) -> None:
        """Count an output that has ended."""
        if not output:
            return
        outputs = self._outputs.setdefault(cache_salt, RecentOutputs(self.max_tokens))
        self._outputs.move_to_end(cache_salt)
        if len(self._outputs) > self.max_salts:
            self._outputs.popitem(last=False)
        outputs.keep(output)


class RecentOutputs:
    """The outputs of some sequences, in two generations: when the younger is full, it becomes the older, which goes.

    Attributes:
        generations: the younger one first.
    """

    __slots__ = ("_most", "generations")

    def __init__(self, max_tokens: int):
        self._most = max_tokens // 2  # of each generation, separators included
        self.generations: tuple[SuffixAutomaton, ...] = ()

    def keep(self, output: Seq[int]) -> None:
        """Of an output that is longer than a generation, the end is kept."""
        output = output[1 - self._most :]
        if not self.generations or self.generations[0].num_tokens + len(output) + 1 > self._most:
            self.generations = (SuffixAutomaton(DEPTH), *self.generations[:1])
        for token in output:
            self.generations[0].append(token)
        self.generations[0].append(SEPARATOR)


class SuffixSequenceProposer:
    """One sequence: an automaton of its own tokens, and where it stands in those of recent outputs."""

    __slots__ = ("_cache_salt", "_generations", "_num_prompt_tokens", "_own", "_proposer", "_readers")

    def __init__(self, proposer: SuffixProposer, prompt: SuffixAutomaton, cache_salt: str):
        self._proposer = proposer
        self._num_prompt_tokens = prompt.num_tokens
        self._cache_salt = cache_salt
        self._own = prompt
        self._generations: tuple[SuffixAutomaton, ...] = ()
        self._readers: list[Reader] = []  # of the generations

    def fork(self) -> SuffixSequenceProposer:
        return SuffixSequenceProposer(self._proposer, self._own.fork(), self._cache_salt)

    def propose(self, token_ids: Seq[int], most: int) -> list[int]:
        own = self._own
        for position in range(own.num_tokens, len(token_ids)):
            own.append(token_ids[position])
        self._meet(self._proposer.generations(self._cache_salt))
        contexts = [last_seen(own)]
        for reader in self._readers:
            reader.read(token_ids)
            contexts.append(reader.context)
        least = self._proposer.least_likelihood
        best: list[int] = []
        most_expected = 0.0
        for context in contexts:
            if context.length >= LEAST_CONTEXT:
                guess, expected = likeliest(context, most, least)
                if expected > most_expected:
                    best, most_expected = guess, expected
        return best

    def end(self, token_ids: Seq[int]) -> None:
        self._proposer.keep(token_ids[self._num_prompt_tokens :], self._cache_salt)

    def _meet(self, generations: tuple[SuffixAutomaton, ...]) -> None:
        """Begin to read what is new, and leave what is gone."""
        if generations is not self._generations:
            known = {id(reader.context.automaton): reader for reader in self._readers}
            self._readers = [known.get(id(automaton)) or Reader(automaton) for automaton in generations]
            self._generations = generations


class Context(NamedTuple):
    """The last `length` tokens of a sequence, at most CONTEXT, and their state in an automaton that knows them."""

    automaton: SuffixAutomaton
    state: int
    length: int


class Reader:
    """Follows a sequence in an automaton of other texts, which may grow meanwhile.

    Attributes:
        context: the longest one that the automaton knows. When it grows it may come to know a longer one: the reader is there as
            soon as CONTEXT more tokens have come.
    """

    __slots__ = ("_num_read", "context")

    def __init__(self, automaton: SuffixAutomaton):
        self.context = Context(automaton, ROOT, 0)
        self._num_read = 0

    def read(self, token_ids: Seq[int]) -> None:
        """Go on to the end of the sequence, or begin just before it: no context reaches further back than CONTEXT tokens."""
        automaton, state, length = self.context
        edges, links, lengths = automaton.edges, automaton.links, automaton.lengths
        start = self._num_read
        if len(token_ids) - start > CONTEXT:
            start, state, length = len(token_ids) - CONTEXT, ROOT, 0
        elif state != ROOT:
            state = automaton.holder(state, length)  # it may have been split
        for position in range(start, len(token_ids)):
            token = token_ids[position]
            while token not in edges[state] and state != ROOT:
                state = links[state]
                length = lengths[state]
            if token in edges[state]:
                state = edges[state][token]
                length += 1
                if length > CONTEXT:
                    length = CONTEXT
                    state = automaton.holder(state, length)
        self._num_read = len(token_ids)
        self.context = Context(automaton, state, length)


def last_seen(automaton: SuffixAutomaton) -> Context:
    """The longest context that the text ends in and has had before."""
    state = automaton.last
    if state == ROOT:
        return Context(automaton, ROOT, 0)
    state = automaton.holder(state, CONTEXT)
    if automaton.counts[state] == 1:
        state = automaton.links[state]
    return Context(automaton, state, min(automaton.lengths[state], CONTEXT))


def likeliest(context: Context, most: int, least_likelihood: float) -> tuple[list[int], float]:
    """Walk on from a context, by the likeliest token each time; the guess, and how many of its tokens are expected to come true.

    What followed a context in `count` of `total` cases is expected to do so again with `count / (total + DOUBT / length)`: there
    may always come something new, but less so the longer the context.
    """
    automaton, state, length = context
    edges, counts = automaton.edges, automaton.counts
    guess: list[int] = []
    expected, likelihood = 0.0, 1.0
    while len(guess) < most:
        while not edges[state]:  # the end of the text: it goes on as it did behind a shorter context
            state = automaton.links[state]
            length = automaton.lengths[state]
        continuations = edges[state]
        if length < LEAST_CONTEXT or len(continuations) > MOST_CONTINUATIONS:
            break
        token = behind = count = total = 0
        for each, state in continuations.items():
            often = counts[state]
            total += often
            if often >= count:  # of equal ones, the one first seen last
                token, behind, count = each, state, often
        likelihood *= count / (total + DOUBT / length)
        if token == SEPARATOR or likelihood < least_likelihood:
            break
        guess.append(token)
        expected += likelihood
        state = behind
        length += 1
        if length > CONTEXT:
            length = CONTEXT
            state = automaton.holder(state, length)
    return guess, expected
