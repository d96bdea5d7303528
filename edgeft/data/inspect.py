"""Statistics of a data set, for `edgeft data`.

Nothing is printed or written here; the result is plain JSON.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np

from edgeft.config import DataConfig
from edgeft.data.forest import Forest
from edgeft.data.rows import Dataset
from edgeft.data.tokens import Encoded, Encoder
from edgeft.formats.tokenizer import Tokenizer

BINS = 8  # of the token histogram, and one for what is longer than max_tokens


def describe(dataset: Dataset, tokenizer: Tokenizer, config: DataConfig) -> dict[str, Any]:
    """Counts, lengths, dropped rows with reasons, and one row as the model sees it."""
    encoder = Encoder(tokenizer, config.max_tokens, config.system)
    train, heldout = encoder.encode(dataset.train), encoder.encode(dataset.heldout)
    both = train + heldout
    tree, flat = len(Forest(train)), sum(len(encoded.ids) for encoded in train)
    cut = [encoded.cut_tokens for encoded in both if encoded.cut_tokens]
    return {
        "format": dataset.format,
        "files": dataset.files,
        "split": dataset.split,
        "rows": {"train": len(dataset.train), "heldout": len(dataset.heldout)},
        "usable": {"train": len(train), "heldout": len(heldout)},
        "max_tokens": config.max_tokens,
        "tokens": _lengths(both, config.max_tokens),
        "cut": {"rows": len(cut), "tokens": sum(cut)},
        "dropped": _reasons(encoder.dropped),
        "skipped": _reasons(dataset.skipped),
        "shared_prefix": {"row_tokens": flat, "tree_tokens": tree, "times": round(flat / tree, 2) if tree else 1.0},
        "example": _example(both[0], tokenizer) if both else None,
    }


def _lengths(rows: list[Encoded], max_tokens: int) -> dict[str, Any]:
    """Lengths before anything was cut."""
    lengths = [len(encoded.ids) + encoded.cut_tokens for encoded in rows] or [0]
    edges = [max_tokens * i // BINS for i in range(BINS + 1)]
    histogram: list[dict[str, int | None]] = [
        {"from": low + 1, "to": high, "rows": sum(low < length <= high for length in lengths)}
        for low, high in pairwise(edges)
    ]
    histogram.append({"from": max_tokens + 1, "to": None, "rows": sum(length > max_tokens for length in lengths)})
    return {
        "total": sum(len(encoded.ids) for encoded in rows),
        "trained": sum(int(encoded.trained.sum()) for encoded in rows),
        "shortest": min(lengths),
        "median": int(np.median(lengths)),
        "longest": max(lengths),
        "histogram": histogram,
    }


def _reasons(pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """[{"reason", "rows", "first"}], the most frequent first."""
    first: dict[str, str] = {}
    for source, reason in pairs:
        first.setdefault(reason, source)
    counts = Counter(reason for _, reason in pairs).most_common()
    return [{"reason": reason, "rows": count, "first": first[reason]} for reason, count in counts]


def _example(encoded: Encoded, tokenizer: Tokenizer) -> dict[str, Any]:
    ids, trained = encoded.ids.tolist(), encoded.trained.tolist()
    pieces = [{"id": i, "text": tokenizer.piece(i), "trained": t} for i, t in zip(ids, trained, strict=True)]
    return {"source": encoded.row.source, "answers": encoded.row.answers, "pieces": pieces}
