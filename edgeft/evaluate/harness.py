"""Tasks of lm-evaluation-harness on any model that can be scored here.

The harness renders prompts and computes its metrics; likelihoods and answers come from the same scorers as for suites.
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
from edgeft.evaluate.request import Scorer
from edgeft.formats.tokenizer import Tokenizer
from edgeft.run.progress import Progress


def run_tasks(
    scorer: Scorer, tokenizer: Tokenizer, tasks: Sequence[str], limit: int | None, progress: Progress, who: str
) -> dict[str, dict[str, float]]:
    """{task: {metric: value}}, a task is a name or a YAML file."""
    try:
        import lm_eval
        import lm_eval.tasks

        from edgeft.evaluate.harness_model import HarnessModel
    except ImportError:
        raise ConfigError(
            "lm-evaluation-harness is not installed", "install it with `pip install 'edgeft[lm-eval]'`"
        ) from None
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
            results |= _run(lm_eval, model, name, limit, manager)
    return results


def _run(lm_eval: Any, model: Any, name: str, limit: int | None, manager: Any) -> dict[str, dict[str, float]]:
    try:
        output = lm_eval.simple_evaluate(
            model=model, tasks=[name], limit=limit, task_manager=manager, bootstrap_iters=0, log_samples=False
        )
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"lm-evaluation-harness cannot run {name}: {reason}", "check that the data of the task is on this machine"
        ) from None
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
