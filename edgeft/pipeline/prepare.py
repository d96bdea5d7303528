"""The prepare stage: rows to tokens."""

from __future__ import annotations

import time

from edgeft.config import Recipe
from edgeft.data import rows as data_rows
from edgeft.data import tokens as data_tokens
from edgeft.data.tokens import Encoded
from edgeft.errors import DataError
from edgeft.formats.source import model_source as model_source
from edgeft.host import device
from edgeft.pipeline.planning import make_plan
from edgeft.run.events import PrepareEvent
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.run.record import Allowance


def encode(recipe: Recipe) -> tuple[data_rows.Dataset, list[Encoded], list[Encoded], data_tokens.Dropped]:
    """(rows as they are in their files, training rows as tokens, held-out rows, what was dropped)."""
    from edgeft.formats.tokenizer import open_tokenizer

    config = recipe.data
    dataset = data_rows.load(config)
    tokenizer = open_tokenizer(model_source(recipe.model.path))
    train, dropped = data_tokens.encode_rows(dataset.train, tokenizer, config.max_tokens, config.system)
    heldout, lost = data_tokens.encode_rows(
        dataset.heldout[: config.heldout_rows], tokenizer, config.max_tokens, config.system
    )
    if not train:
        reason = dropped[0][1] if dropped else "there are none"
        raise DataError(f"no row can be trained on: {reason}", "raise data.max_tokens, or look with `edgeft data FILE`")
    return dataset, train, heldout, dropped + lost


def prepare(run: Run, progress: Progress, allowed: Allowance = Allowance()) -> tuple[list[Encoded], list[Encoded]]:
    """Training and held-out rows as tokens; nothing is kept of a run that does not fit its budget."""
    if run.tokens.is_file():
        return data_tokens.load(run.tokens)
    started = time.monotonic()
    dataset, train, heldout, dropped = encode(run.recipe)
    recipe = run.fitted
    if allowed.budget_bytes:
        recipe = make_plan(run, recipe, (train, heldout), allowed, progress)
    if recipe.update.needs_search:
        from edgeft.search.stage import use_rule_if_cheaper

        use_rule_if_cheaper(run, recipe, train, heldout, progress)
    data_tokens.save(run.tokens, train, heldout)
    counts = {
        "train_rows": len(train),
        "heldout_rows": len(heldout),
        "train_tokens": int(sum(len(r.ids) for r in train)),
        "dropped": len(dropped),
        "skipped": len(dataset.skipped),
        "cut": sum(1 for r in train + heldout if r.cut_tokens),
    }
    seconds, machine = round(time.monotonic() - started, 2), device.this_machine().about.removeprefix("this machine: ")
    run.log(PrepareEvent(dataset.format, seconds, machine, **counts))
    lost_text = f", {counts['dropped'] + counts['skipped']} left out" if counts["dropped"] + counts["skipped"] else ""
    progress.line(
        f"data: {len(train)} rows to train on, {len(heldout)} held out ({dataset.split}), "
        f"format {dataset.format}{lost_text}"
    )
    return train, heldout
