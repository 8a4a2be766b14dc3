"""A suffix automaton that grows token by token: which contexts a text has had, what followed them, and how often."""

from __future__ import annotations

ROOT = 0
NONE = -1


class SuffixAutomaton:
    """All strings of up to `depth` tokens that a text holds, with how often each occurs in it.

    A state stands for all strings that end at the same places of the text: the longest of them and its suffixes, down to one
    token more than the longest string of its link. The link's strings are suffixes of them that end at more places.

    In a text that repeats itself, an automaton of all strings has links about as long as the text. Here, a text whose last
    `depth` tokens have occurred before goes on in the state that they had, as if all that was before them had been the same too.
    It then has longer strings that are not in the text, so nobody may look for more than `depth` tokens. In return no walk
    along links takes more than `depth` + 1 steps, and a loop adds no states.

    A token adds at most two states, 1.3 in prose, of about 0.3 KB each.

    Source: Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985), with the online construction.

    Attributes:
        edges: of each state, token -> the state of its strings with that token behind them; the one first seen is the first.
        links: of each state, that of its longest suffix which is not a string of its own; NONE for the root.
        lengths: of each state, the number of tokens of its longest string.
        counts: of each state, how often its strings of up to `depth` tokens occur; of no use to the root.
        last: the state of the last tokens of the text: `depth` of them, or all.
    """

    __slots__ = ("_copied", "_num_shared", "counts", "depth", "edges", "last", "lengths", "links", "num_tokens")

    def __init__(self, depth: int):
        self.depth = depth
        self.edges: list[dict[int, int]] = [{}]
        self.links = [NONE]
        self.lengths = [0]
        self.counts = [0]
        self.last = ROOT
        self.num_tokens = 0
        # So many first states may have the very edges of the automaton that this one was forked from, but for those whose edges
        # were copied since.
        self._num_shared = 0
        self._copied: set[int] = set()

    def fork(self) -> SuffixAutomaton:
        """An automaton of the same text, to which other tokens may be appended; none may be appended to this one any more.

        Edges take most of the memory. The two share those of each state that the fork does not add to.
        """
        fork = SuffixAutomaton(self.depth)
        fork.edges, fork.links = self.edges.copy(), self.links.copy()
        fork.lengths, fork.counts = self.lengths.copy(), self.counts.copy()
        fork.last, fork.num_tokens, fork._num_shared = self.last, self.num_tokens, len(self.edges)
        return fork

    def _own_edges(self, state: int) -> dict[int, int]:
        """The edges of a state, to add to them or to change them."""
        if state < self._num_shared and state not in self._copied:
            self._copied.add(state)
            self.edges[state] = self.edges[state].copy()
        return self.edges[state]

    def append(self, token: int) -> None:
        links, counts = self.links, self.counts
        state = self.edges[self.last].get(token)
        if state is None:
            state = self._add(token)
        if self.lengths[links[state]] >= self.depth:
            state = links[state]
        self.last = state
        self.num_tokens += 1
        while state != ROOT:
            counts[state] += 1
            state = links[state]

    def holder(self, state: int, length: int) -> int:
        """The state of the last `length` tokens (1 or more) of a string that the state has, or had before it was split."""
        links, lengths = self.links, self.lengths
        while lengths[links[state]] >= length:
            state = links[state]
        return state

    def _add(self, token: int) -> int:
        """A state for the text with a token that has not followed it yet."""
        edges, links, lengths = self.edges, self.links, self.lengths
        new = len(edges)
        state = self.last
        edges.append({})
        lengths.append(lengths[state] + 1)
        self.counts.append(0)
        links.append(ROOT)
        while state != NONE:
            after = edges[state].get(token)
            if after is None:
                self._own_edges(state)[token] = new
            else:
                links[new] = after if lengths[after] == lengths[state] + 1 else self._split(state, token, after)
                break
            state = links[state]
        return new

    def _split(self, state: int, token: int, after: int) -> int:
        """A state for those strings behind the edge that now end at one more place than the longer ones."""
        edges, links = self.edges, self.links
        clone = len(edges)
        edges.append(edges[after].copy())
        links.append(links[after])
        self.lengths.append(self.lengths[state] + 1)
        self.counts.append(self.counts[after])
        links[after] = clone
        while state != NONE and edges[state].get(token) == after:
            self._own_edges(state)[token] = clone
            state = links[state]
        return clone
