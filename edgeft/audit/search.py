"""DAGER's search, for a frozen trunk: tokens, then rows token by token, by their distance to the gradients' spans.

The server knows the trunk, so it runs every candidate, prefix and next token, to the cut, and tests there what the
first trained block would have read. At cut 0 this is the embedding alone: the set of all tokens is found first, and put
in order by the second block, whose input depends on what stands before. Candidates of one prefix are a prefix tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from edgeft.audit.pursuit import pursuit
from edgeft.audit.sent import Tensors
from edgeft.audit.span import Span, read_input, spans_of
from edgeft.data.tree import Tree
from edgeft.engine.stack import Batch, Stack

Tensor = torch.Tensor
# Of an exact span: farther is outside. Inputs of deeper blocks have one direction in common: on SmolLM2-135M, 4 rows
# with a passage, a wrong token after a right prefix is 1e-3 off and more, a right one 4e-6 at most
INSIDE = 1e-4
# Where the span is not exact: standard deviations below the mean distance of tokens drawn at random in the same place
OUTLIER = 4.0
DRAWN, SOFT_BEAMS = 512, 4
MOST = 64  # tokens of which a pruned or noisy gradient is made
AT_ONCE = 4096  # candidates that are run together
TIERS = (256, 4096)  # most likely next tokens, by the untuned model, that are tried before the whole vocabulary


@dataclass(frozen=True)
class Known:
    """What the server knows beside what is sent: the model as the round began, and what the chat template gives."""

    stack: Stack
    cut: int
    vocabulary: int
    prefix: tuple[int, ...] = ()  # tokens with which every row begins
    end: int | None = None  # the token that ends every row: no gradient comes from it
    longest: int = 512  # tokens of a row at most

    def likely(self, beam: list[int]) -> Tensor:
        """Next tokens, the likeliest first, by the model."""
        with torch.no_grad():
            hidden = self.after(beam, torch.empty(0, dtype=torch.long), range(self.stack.depth))
            return self.stack.head.logits(self.stack.final(hidden[-1:]))[0, : self.vocabulary].argsort(descending=True)

    def after(self, beam: list[int], candidates: Tensor, blocks: range, hidden: Tensor | None = None) -> Tensor:
        """The beam with each of these tokens after it, as a prefix tree: the residual stream after the blocks; hidden:
        before them."""
        stack, length = self.stack, len(beam)
        tokens = torch.cat([torch.tensor(beam, dtype=torch.long), candidates])
        parents = np.concatenate([np.arange(-1, length - 1), np.full(len(candidates), length - 1)])
        positions = torch.arange(len(tokens)).clamp(max=length)
        nothing = torch.empty(0, dtype=torch.long)
        batch = Batch(tokens, positions, Tree(parents), nothing, nothing)
        with torch.no_grad():
            return stack.run(stack.embed(tokens) if hidden is None else hidden, batch, blocks)


@dataclass
class Found:
    """rows: token ids without the prefix; bag: tokens that occur, where no order was found, the surest first."""

    rows: list[list[int]]
    bag: list[int]
    how: str  # one sentence: why it did or did not go further


class Search:
    """One message against one model. exact: a token is inside or not; else candidates are ranked by distance."""

    def __init__(self, known: Known, sent: Tensors, count: int) -> None:
        """count: rows in the message, which the server is told."""
        self.known, self.count = known, count
        depth = known.stack.depth
        self.levels = {
            n: span for n in (known.cut, known.cut + 1) if n < depth for span in spans_of(sent, known.stack, n)
        }
        # at cut 0 the first block reads the embedding alone, whatever stands before
        self.alone: Span | None = self.levels.pop(0, None)
        draw = torch.Generator().manual_seed(0)
        self.drawn = torch.randint(known.vocabulary, (DRAWN,), generator=draw)

    @property
    def certain(self) -> bool:
        """It can find whole rows."""
        return self.exact and bool(self.levels)

    @property
    def exact(self) -> bool:
        return all(span.exact for span in (self.alone, *self.levels.values()) if span is not None)

    def run(self) -> Found:
        if self.alone is None and not self.levels:
            return Found([], [], "the spans of what is sent hold everything: no token can be told apart")
        bag = None if self.alone is None else self._tokens(self.alone)
        seen = [] if bag is None else bag.tolist()
        if bag is not None and not seen:
            return Found([], [], "no token stands out")
        if not self.levels:
            return Found([], seen, "tokens are seen, and no second block that would order them")
        sure = "each token lies in the span of the gradients, or it does not"
        return Found(self._rows(bag), seen, sure if self.exact else "tokens that stand out of noise or pruning")

    def _tokens(self, span: Span) -> Tensor:
        """At cut 0: tokens whose embedding is in the span, the nearest first; where none is for certain, those of which
        the gradient is made."""
        stack, every = self.known.stack, torch.arange(self.known.vocabulary)
        with torch.no_grad():
            read = torch.cat([read_input(stack, 0, stack.embed(ids)) for ids in every.split(AT_ONCE)])
            if span.exact:
                distances = span.distances(read)
                return distances.argsort()[: int((distances < INSIDE).sum())]
            return torch.tensor(pursuit(span.seen(read), span.strong, MOST, self.known.prefix), dtype=torch.long)

    def _rows(self, bag: Tensor | None) -> list[list[int]]:
        """Breadth first from the template's prefix, the nearest beams first. A row ends where no token continues it."""
        first = list(self.known.prefix)
        beams, ended = [(0.0, first)], list[list[int]]()
        while beams:
            longer: list[tuple[float, list[int]]] = []  # (sum of distances, tokens)
            for total, beam in beams:
                after = self._after(beam, bag) if len(beam) < self.known.longest else []
                longer += [(total + distance, [*beam, token]) for token, distance in after]
                if not after and len(beam) > len(first):
                    ended.append(beam)
            beams = sorted(longer)[: 4 * self.count + 4 if self.exact else SOFT_BEAMS]
        ended.sort(key=len, reverse=True)
        tail = [] if self.known.end is None else [self.known.end]
        return [row[len(first) :] + tail for row in ended]

    def _after(self, beam: list[int], bag: Tensor | None) -> list[tuple[int, float]]:
        """Tokens that may follow, with their distances."""
        for candidates in self._candidates(beam, bag):
            if len(set(beam)) == 1:  # the same token again attends to nothing else: its state is the one before
                candidates = candidates[candidates != beam[0]]
            if not len(candidates):
                continue
            distances = self._distances(beam, candidates)
            limit = INSIDE if self.exact else _outside(self._distances(beam, self.drawn))
            nearest = [(int(candidates[n]), float(distances[n])) for n in distances.argsort()[: self.count]]
            if nearest[0][1] < limit:
                return [(token, distance) for token, distance in nearest if distance < limit]
        return []

    def _candidates(self, beam: list[int], bag: Tensor | None) -> Iterator[Tensor]:
        """In the order in which they are worth a run. Without a test that is certain, the likeliest alone: among all
        tokens some would stand out by chance."""
        if bag is not None:
            yield bag
            return
        if beam:
            order = self.known.likely(beam)
            start = 0
            for stop in TIERS if self.count == 1 or not self.exact else TIERS[1:]:  # rows may part at any token
                yield order[start:stop]
                start = stop
                if not self.exact:
                    return
            yield order[start:]
        else:
            yield torch.arange(self.known.vocabulary)

    def _distances(self, beam: list[int], candidates: Tensor) -> Tensor:
        """The largest over all levels."""
        parts = []
        for some in candidates.split(AT_ONCE):
            worst, done = torch.zeros(len(some)), 0
            hidden: Tensor | None = None
            for level, span in self.levels.items():
                hidden = self.known.after(beam, some, range(done, level), hidden)
                done = level
                read = read_input(self.known.stack, level, hidden[len(beam) :])
                worst = torch.maximum(worst, span.distances(read))
            parts.append(worst)
        return torch.cat(parts)


def _outside(distances: Tensor) -> float:
    """Nearer than this is no token that does not belong there."""
    return float(distances.mean() - OUTLIER * distances.std())
