"""Gradient matching for one short row, for schemes whose gradients span nothing: low-rank updates, biases, norms.

As in Deep Leakage from Gradients the gradient of a dummy row is brought near what was sent, but over tokens: the
matching loss D = mean over tensors of 1 - cos has a gradient at the dummy's embeddings, which ranks every replacement
of a token; the best few are tried. It comes from two more ordinary backward passes, no second derivative:
∂D/∂e = [∂L/∂e(θ + εv) - ∂L/∂e(θ - εv)] / 2ε with v = ∂D/∂g. The server is given the row's length and which tokens are
answers: more than it has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from edgeft.audit.answers import answer_tokens
from edgeft.audit.search import Found, Known
from edgeft.audit.sent import Model, Tensors, restricted
from edgeft.data.tokens import Encoded

Tensor = torch.Tensor
Change = Callable[[Tensor], Tensor]  # of a dummy row's tokens
STEP = 1e-3  # ε, as a share of the weights' norm
BEST = 16  # replacements by place that are candidates
TRIED = 24  # of all these in one step, and as many tokens of the answers, as the last block shows them
LIKELY = 4  # next tokens that the model expects, tried at one random place in each step
MOVED = 24  # pieces of the row that are moved, in one step (Balunović et al. 2022, LAMP)
MATCHED = 1e-5  # a matching loss of rounding alone: the row is found


class Matching:
    def __init__(self, model: Model, known: Known, sent: Tensors, row: Encoded) -> None:
        self.model, self.known, self.row = model, known, row
        self.sent = {name: tensor for name, tensor in sent.items() if tensor.any()}
        first, last = len(known.prefix), len(row.ids) - (known.end is not None)
        self.places = range(first, last)
        self.answers = answer_tokens(sent, known.stack, known.vocabulary)
        self.embeddings = known.stack.embed(torch.arange(known.vocabulary))  # (vocabulary, d)

    def loss(self, ids: Tensor) -> tuple[float, Tensors]:
        """(D, the dummy's gradient)."""
        mine = restricted(self.model.gradient([self._dummy(ids)]), self.model.support)
        return sum(1 - _cosine(mine[name], sent) for name, sent in self.sent.items()) / len(self.sent), mine

    def _dummy(self, ids: Tensor) -> Encoded:
        return replace(self.row, ids=ids.int().numpy())

    def scores(self, ids: Tensor, mine: Tensors) -> Tensor:
        """(places, vocabulary): the expected change of D by each replacement."""
        slope = self._slope(ids, self._direction(mine))[list(self.places)]  # (places, d)
        own = (slope * self.embeddings[ids[list(self.places)]]).sum(1, keepdim=True)
        change: Tensor = slope @ self.embeddings.T - own
        return change

    def _direction(self, mine: Tensors) -> Tensors:
        """∂D/∂g, by tensor."""
        made = {}
        for name, sent in self.sent.items():
            g, norm = mine[name], float(mine[name].norm()) + 1e-30
            unit = sent / float(sent.norm())
            made[name] = (g * (float((g * unit).sum()) / norm**2) - unit) / (norm * len(self.sent))
        return made

    def _slope(self, ids: Tensor, direction: Tensors) -> Tensor:
        """∂D/∂e (T, d), by central differences along v."""
        parameters = {name: self.model.parameters[name] for name in direction}
        before = {name: p.detach().clone() for name, p in parameters.items()}
        size = sum(float(p.norm()) ** 2 for p in before.values()) ** 0.5 or 1.0
        step = STEP * size / (sum(float(v.norm()) ** 2 for v in direction.values()) ** 0.5 + 1e-30)
        sides = []
        for sign in (1, -1):
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(before[name] + sign * step * direction[name])
            sides.append(self.model.embedding_gradient(self._dummy(ids)))
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(before[name])
        slope: Tensor = (sides[0] - sides[1]) / (2 * step)
        return slope

    def candidates(self, ids: Tensor, mine: Tensors, draw: random.Random) -> list[tuple[int, int]]:
        """(place, token) to try: some of the best by slope, and what the model expects at one place."""
        best = self.scores(ids, mine).topk(min(BEST, self.known.vocabulary), largest=False).indices
        every = [(place, int(token)) for place, row in zip(self.places, best, strict=True) for token in row]
        place = draw.choice(self.places)
        expected = [(place, int(token)) for token in self.known.likely(ids[:place].tolist())[:LIKELY]] if place else []
        answered = [(place, token) for place in self.places for token in self.answers]
        tried = [pair for pairs in (every, answered) for pair in draw.sample(pairs, min(TRIED, len(pairs)))]
        return tried + expected


def replaced(place: int, token: int, ids: Tensor) -> Tensor:
    other = ids.clone()
    other[place] = token
    return other


def inserted(place: int, token: int, dropped: int, ids: Tensor) -> Tensor:
    """Another token there and one less elsewhere: what lies between is right, but shifted."""
    others = torch.cat([ids[:dropped], ids[dropped + 1 :]])
    return torch.cat([others[:place], torch.tensor([token]), others[place:]])


def moved(first: int, last: int, to: int, ids: Tensor) -> Tensor:
    """The tokens from the first to the last in another place: what is right may stand in the wrong order."""
    some, others = ids[first : last + 1], torch.cat([ids[:first], ids[last + 1 :]])
    return torch.cat([others[:to], some, others[to:]])


def match(model: Model, known: Known, sent: Tensors, row: Encoded, start: Sequence[int], steps: int) -> Found:
    """The row whose gradient is nearest to what was sent, after so many steps from the tokens `start`."""
    search, draw = Matching(model, known, sent, row), random.Random(0)
    ids = torch.from_numpy(row.ids).long().clone()
    places = list(search.places)
    ids[places] = torch.tensor((list(start) * len(places))[: len(places)] if start else [0] * len(places))
    best, mine = search.loss(ids)
    for _ in range(steps):
        if best < MATCHED:
            break
        pairs = search.candidates(ids, mine, draw)
        changes: list[Change] = [partial(replaced, *pair) for pair in pairs]
        changes += [partial(inserted, *pair, draw.choice(places)) for pair in pairs]
        for _ in range(MOVED):
            first, last = sorted(draw.choices(places, k=2))
            changes.append(partial(moved, first, last, min(draw.choice(places), places[-1] - last + first)))
        for change in changes:
            other = change(ids)
            loss, gradient = search.loss(other)
            if loss < best:
                ids, best, mine = other, loss, gradient
    found = ids[len(known.prefix) :].tolist()
    return Found([found], [], f"matching: the dummy row's gradient is {best:.2g} from what was sent (0 = the same)")


def _cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum()) / (float(a.norm()) * float(b.norm()) + 1e-30)
