"""Tasks of lm-evaluation-harness on any model that can be scored here.

The harness renders prompts and computes its metrics; likelihoods and answers come from the code that scores suites.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from edgeft.errors import ConfigError, DataError
from edgeft.evaluate.ask import Ask, Scorer
from edgeft.formats.tokenizer import Tokenizer, render
from edgeft.run.progress import Progress

MAX_NEW = 256  # where a task names no limit
LONGEST = 2048  # tokens of a row; what is longer loses its start


def _library() -> Any:
    try:
        import lm_eval
        import lm_eval.api.model
        import lm_eval.tasks
    except ImportError:
        raise ConfigError(
            "lm-evaluation-harness is not installed", "install it with `pip install 'edgeft[lm-eval]'`"
        ) from None
    return lm_eval


def _model_class() -> Any:
    """Made when it is needed: the harness is an extra."""
    lm_eval = _library()

    class Model(lm_eval.api.model.TemplateLM):  # type: ignore[misc, name-defined]
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

        def _ask(self, asks: list[Ask], max_new: int) -> Any:
            self.progress.stage(f"{self.who} model", len(asks))
            done = 0

            def advance(now: int, _: int) -> None:
                nonlocal done
                self.progress.advance(now - done, "requests")
                done = now

            said = self.scorer.ask(asks, max_new, advance)
            self.progress.end()
            return said

        def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            """Requests with the same context are one ask: the choices share their question."""
            asks: dict[tuple[int, ...], Ask] = {}
            places = []
            for _texts, context, continuation in requests:
                prompt = tuple((context or [self.eot_token_id])[-LONGEST:])
                ask = asks.setdefault(prompt, Ask(list(prompt)))
                places.append((prompt, len(ask.options)))
                ask.options.append(list(continuation))
            order = list(asks)
            said = dict(zip(order, self._ask([asks[p] for p in order], 0), strict=True))
            return [(-said[p].option_nll[k], said[p].option_greedy[k]) for p, k in places]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            asks, owners = [], []
            for number, request in enumerate(requests):
                ids = [self.eot_token_id, *self.tok_encode(request.args[0])]
                for start in range(0, len(ids) - 1, LONGEST - 1):  # each piece begins with the last token before it
                    piece = ids[start : start + LONGEST]
                    asks.append(Ask(piece, list(range(1, len(piece)))))
                    owners.append(number)
            totals = [0.0] * len(requests)
            for owner, said in zip(owners, self._ask(asks, 0), strict=True):
                totals[owner] -= said.prompt_nll
            return totals

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            outputs = [""] * len(requests)
            groups: dict[int, list[int]] = {}
            for i, request in enumerate(requests):
                wanted = request.args[1]
                groups.setdefault(int(wanted.get("max_gen_toks", wanted.get("max_new_tokens", MAX_NEW))), []).append(i)
            for max_new, rows in groups.items():
                asks = [Ask(self.tok_encode(requests[i].args[0])[-LONGEST:], generate=True) for i in rows]
                for i, said in zip(rows, self._ask(asks, max_new), strict=True):
                    text = self.tokens.decode(said.output)
                    until = requests[i].args[1].get("until") or []
                    for stop in [until] if isinstance(until, str) else until:
                        text = text.split(stop, 1)[0] if stop else text
                    outputs[i] = text
            return outputs

    return Model


def run_tasks(
    scorer: Scorer, tokenizer: Tokenizer, tasks: Sequence[str], limit: int | None, progress: Progress, who: str
) -> dict[str, dict[str, float]]:
    """{task: {metric: value}}, as the harness computes it; a task is its name or a YAML file of one's own."""
    lm_eval = _library()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model = _model_class()(scorer, tokenizer, progress, who)
    results: dict[str, dict[str, float]] = {}
    for task in tasks:
        file = Path(task).resolve() if task.endswith((".yaml", ".yml")) else None
        if file is not None and not file.is_file():
            raise ConfigError(f"there is no task file {task}")
        # The harness reads thousands of task files of its own, which takes a while: not for a file of one's own.
        manager = lm_eval.tasks.TaskManager(include_path=str(file.parent) if file else None, include_defaults=not file)
        name = _name(file) if file else task
        if name not in manager.all_tasks:
            raise ConfigError(f"lm-evaluation-harness knows no task `{name}`", "`lm-eval ls tasks` lists them")
        with _inside(file.parent if file else Path.cwd()):  # a task file names its data from where it lies
            results |= _run(lm_eval, model, name, limit, manager)
    return results


def _run(lm_eval: Any, model: Any, name: str, limit: int | None, manager: Any) -> dict[str, dict[str, float]]:
    try:
        found = lm_eval.simple_evaluate(
            model=model, tasks=[name], limit=limit, task_manager=manager, bootstrap_iters=0, log_samples=False
        )
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"lm-evaluation-harness cannot run {name}: {reason}", "is the task's data there?") from None
    return {
        task: {key.removesuffix(",none"): value for key, value in values.items() if isinstance(value, float)}
        for task, values in found["results"].items()
    }


def _name(file: Path) -> str:
    match = re.search(r"^task:\s*[\"']?([\w.-]+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise ConfigError(f"{file.name} has no `task:`", "a task of lm-evaluation-harness begins with its name")
    return match.group(1)


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
