"""`edgeft audit`: rows and scheme of a run or a recipe, given to the attacks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from edgeft import plan
from edgeft.arch.check import check_model
from edgeft.config import Recipe
from edgeft.data import tokens as data_tokens
from edgeft.errors import ConfigError
from edgeft.formats.source import model_source
from edgeft.pipeline.prepare import encode
from edgeft.run.folder import Run
from edgeft.run.progress import Progress


@dataclass(frozen=True)
class Message:
    """What is sent, as the command line has it."""

    rows: str = "1,4,16"
    send: str = "dense"
    dp: str | None = None
    match_steps: int = 0
    epoch: bool = True  # the update of a local epoch, too


def audit(run: Run | None, recipe: Recipe, message: Message, progress: Progress) -> dict[str, Any]:
    """run: its rows are audited; None: those of the recipe."""
    from edgeft.audit import attack
    from edgeft.audit.sent import Noise, parse_send
    from edgeft.formats.tokenizer import open_tokenizer
    from edgeft.methods import scheme as schemes

    counts, noise = attack.parse_counts(message.rows), Noise.parse(message.dp) if message.dp else None
    parse_send(message.send)  # before anything is computed
    source = model_source(recipe.model.path)
    check_model(source, recipe.model.frozen)
    if recipe.update.needs_search:
        raise ConfigError(
            "what this recipe sends is not known before its search", "audit a run of it: `edgeft audit RUN`"
        )
    shape = plan.shape_of(source, recipe.model.frozen)
    recipe = replace(recipe, update=schemes.with_blocks(recipe.update, shape.depth, shape.weights))
    rows = data_tokens.load(run.tokens)[0] if run and run.tokens.is_file() else encode(recipe)[1]
    request = attack.Request(recipe, rows, counts, message.send, noise, message.epoch, message.match_steps)
    return attack.run(request, open_tokenizer(source), progress)
