"""Tasks of lm-evaluation-harness on any model that can be scored here.

The harness renders prompts and computes its metrics; likelihoods and answers come from the same scorers as for suites.
Importing this module needs the extra `lm-eval`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.tasks
from lm_eval.api.model import TemplateLM

from edgeft.errors import ConfigError, DataError
from edgeft.evaluate.request import Request, Response, Scorer, row_progress
from edgeft.formats.tokenizer import Tokenizer, render
from edgeft.run.progress import Progress

MAX_NEW = 256  # where a task sets no limit
MAX_TOKENS = 2048  # of a row; a longer one loses its start


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """`requests` are the harness's own: strings or token ids, with their generation settings."""

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, progress: Progress, who: str) -> None:
        super().__init__()
        self.scorer, self.tokens, self.progress, self.who = scorer, tokenizer, progress, who

    @property
    def eot_token_id(self) -> int:
        return max(self.tokens.eos, 0)

    @property
    def tokenizer_name(self) -> str:
        return "edgeft"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.tokens.encode(string)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return render(self.tokens, chat_history, generate=add_generation_prompt)

    def _respond(self, requests: list[Request], max_new: int) -> list[Response]:
        with row_progress(self.progress, f"{self.who} model", len(requests), "requests") as advance:
            return self.scorer.respond(requests, max_new, advance)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Requests with the same context become one: the choices share their question."""
        merged: dict[tuple[int, ...], Request] = {}
        places = []
        for _texts, context, continuation in requests:
            prompt = tuple((context or [self.eot_token_id])[-MAX_TOKENS:])
            request = merged.setdefault(prompt, Request(list(prompt)))
            places.append((prompt, len(request.options)))
            request.options.append(list(continuation))
        responses = dict(zip(merged, self._respond(list(merged.values()), 0), strict=True))
        return [(-responses[p].option_nll[k], responses[p].option_greedy[k]) for p, k in places]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        pieces, owners = [], []
        for number, request in enumerate(requests):
            ids = [self.eot_token_id, *self.tok_encode(request.args[0])]
            for start in range(0, len(ids) - 1, MAX_TOKENS - 1):  # each piece begins with the last token before it
                piece = ids[start : start + MAX_TOKENS]
                pieces.append(Request(piece, list(range(1, len(piece)))))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, response in zip(owners, self._respond(pieces, 0), strict=True):
            totals[owner] -= response.prompt_nll
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        outputs = [""] * len(requests)
        groups: dict[int, list[int]] = {}
        for i, request in enumerate(requests):
            settings = request.args[1]
            groups.setdefault(int(settings.get("max_gen_toks", settings.get("max_new_tokens", MAX_NEW))), []).append(i)
        for max_new, rows in groups.items():
            prompts = [Request(self.tok_encode(requests[i].args[0])[-MAX_TOKENS:], generate=True) for i in rows]
            for i, response in zip(rows, self._respond(prompts, max_new), strict=True):
                text = self.tokens.decode(response.output)
                until = requests[i].args[1].get("until") or []
                for stop in [until] if isinstance(until, str) else until:
                    text = text.split(stop, 1)[0] if stop else text
                outputs[i] = text
        return outputs


def run_tasks(
    scorer: Scorer, tokenizer: Tokenizer, tasks: Sequence[str], limit: int | None, progress: Progress, who: str
) -> dict[str, dict[str, float]]:
    """{task: {metric: value}}, a task is a name or a YAML file."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model = HarnessModel(scorer, tokenizer, progress, who)
    results: dict[str, dict[str, float]] = {}
    for task in tasks:
        file = Path(task).resolve() if task.endswith((".yaml", ".yml")) else None
        if file is not None and not file.is_file():
            raise ConfigError(f"no task file {task}")
        # Reading the thousands of task files of the harness takes seconds: not for a file of the user's own.
        manager = lm_eval.tasks.TaskManager(include_path=str(file.parent) if file else None, include_defaults=not file)
        name = _task_name(file) if file else task
        if name not in manager.all_tasks:
            raise ConfigError(f"lm-evaluation-harness knows no task `{name}`", "`lm-eval ls tasks` lists them")
        with _working_directory(file.parent if file else Path.cwd()):  # paths in a task file are relative to it
            results |= _run(model, name, limit, manager)
    return results


def _run(model: HarnessModel, name: str, limit: int | None, manager: Any) -> dict[str, dict[str, float]]:
    try:
        output = lm_eval.simple_evaluate(
            model=model, tasks=[name], limit=limit, task_manager=manager, bootstrap_iters=0, log_samples=False
        )
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        hint = "check that the data of the task is on this machine"
        raise DataError(f"lm-evaluation-harness cannot run {name}: {reason}", hint) from None
    return {
        task: {key.removesuffix(",none"): value for key, value in values.items() if isinstance(value, float)}
        for task, values in output["results"].items()
    }


def _task_name(file: Path) -> str:
    match = re.search(r"^task:\s*[\"']?([\w.-]+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise ConfigError(f"{file.name} has no `task:`", "a task of lm-evaluation-harness begins with its name")
    return match.group(1)


@contextlib.contextmanager
def _working_directory(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
