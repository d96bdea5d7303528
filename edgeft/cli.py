"""The commands. This is the only module that prints.

A user's mistake ends with `error:` and `hint:` on stderr and its own exit code; a bug keeps its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from edgeft import __version__, config
from edgeft.errors import ConfigError, ConfigWarning, EdgeftError
from edgeft.formats.source import model_source
from edgeft.host import offline
from edgeft.host.profile import load_device, resolve
from edgeft.ui.screen import Screen

# Waiting compute threads spin for a moment only, then sleep. On a machine that does anything else, threads that spin
# for long made llama.cpp ten times slower; sleeping at once (OMP_WAIT_POLICY=passive) made training 1.5 times slower.
# It must be set before torch or llama.cpp is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
offline.quiet()

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tunes LLaMA-class language models on the machine they will run on.",
)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

ModelOption = Annotated[str | None, typer.Option("--model", "-m", help="GGUF file, Hugging Face folder or hub id.")]
DataOption = Annotated[str | None, typer.Option("--data", "-d", help="File, folder or hub id with rows.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="One knob: `--set train.lr=2e-4`. May be repeated.")]
RecipeOption = Annotated[
    str | None, typer.Option("--recipe", "-r", help="Shipped recipe or YAML file. [default: sparse-bp]")
]
DeviceOption = Annotated[str | None, typer.Option(help="Device profile or YAML file. [default: auto, this machine]")]
MemoryOption = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory that a run may use: 1500MiB. [default: the device's budget]")
]
FitOption = Annotated[
    bool, typer.Option("--fit", help="Train fewer channels, tensors or blocks, if that is what it takes to fit.")
]
OfflineOption = Annotated[
    bool, typer.Option("--offline", help="Open no socket; always so when model and data are files here.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Errors and warnings for people, with their exit codes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", ConfigWarning)
            show_other = warnings.showwarning

            def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
                if issubclass(category, ConfigWarning):
                    err.print(f"[bold yellow]warning:[/] {_plain(str(message))}", soft_wrap=True)
                else:
                    show_other(message, category, *where, **more)

            warnings.showwarning = show
            yield
    except EdgeftError as error:
        err.print(f"[bold red]error:[/] {_plain(error.message)}", soft_wrap=True)
        if error.hint:
            err.print(f"[bold]hint:[/] {_plain(error.hint)}", soft_wrap=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        err.print("stopped")
        raise typer.Exit(130) from None
    except BrokenPipeError:
        raise typer.Exit(0) from None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        err.print("[bold red]error:[/] a name that was given is too long to be a file's", soft_wrap=True)
        err.print("[bold]hint:[/] look at the command's names for one that is cut, doubled or quoted wrongly")
        raise typer.Exit(ConfigError.exit_code) from None


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(" ".join(text.split()))


def command(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def register(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> None:
            with exit_on_error():
                function(*args, **kwargs)

        return app.command(*names)(guarded)

    return register


def _print_json(values: Any) -> None:
    sys.stdout.write(json.dumps(values, indent=1, ensure_ascii=False) + "\n")


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        out.print(f"edgeft {__version__}")
        raise typer.Exit


# ---------------------------------------------------------------- finetune


@command()
def finetune(
    recipe: RecipeOption = None,
    device: DeviceOption = None,
    model: ModelOption = None,
    data: DataOption = None,
    out_folder: Annotated[Path, typer.Option("--out", "-o", help="Run folder. [default: runs/<recipe>]")] = Path(""),
    sets: SetOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    until: Annotated[str, typer.Option(help="Last stage: prepare, train, export or eval.")] = "eval",
    threads: Annotated[int | None, typer.Option(help="Compute threads. [default: the device's]")] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="TIMES", help="Work only then, and pause in between: 22:00-07:00.")
    ] = None,
    no_keep_data: Annotated[
        bool, typer.Option("--no-keep-data", help="At the end, take away tokens and cache: `how.keep_data=false`.")
    ] = False,
    memory: MemoryOption = None,
    fit: FitOption = False,
    enforce: Annotated[
        bool, typer.Option("--enforce", help="Have the system hold the run to this memory: a control group, or ulimit.")
    ] = False,
    no_network: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune, export to GGUF, and compare before and after. With no model and data: the embedded ones."""
    from edgeft.pipeline import finetune
    from edgeft.run.folder import Run

    if until not in finetune.STAGES:
        raise ConfigError(f"unknown stage `{until}`", f"known: {', '.join(finetune.STAGES)}")
    folder = out_folder if str(out_folder) != "." else Path("runs") / Path(recipe or "sparse-bp").stem
    asked = {"how.threads": threads, "governor.schedule": schedule, "how.keep_data": False if no_keep_data else None}
    sets = [*(sets or []), *(f"{key}={value}" for key, value in asked.items() if value is not None)]
    choice, profile = _resolve(recipe, device, model, data, sets, folder if resume else None)
    budget = config.parse_size(memory) if memory else profile.budget_bytes
    offline.disable_network_if(no_network, model_source(choice.model.path), choice.data.path, choice.data.heldout)
    screen = Screen(err if as_json else out)
    run = Run.start(folder, choice, resume)
    screen.line(f"run {folder} · recipe {choice.name} · model {Path(model_source(choice.model.path)).name}")
    result = finetune.finetune(run, until, budget, to_stderr=as_json, fit=fit, enforce=enforce)
    if as_json:
        _print_json(result)
    elif result.get("eval"):
        _print_scores(result["eval"])
    if not as_json and "export" in result:
        out.print(
            f"\ntalk to it:  edgeft chat {folder}\nor:          llama-cli -m {result['export']['path']}", soft_wrap=True
        )


def _resolve(
    recipe: str | None,
    device: str | None,
    model: str | None,
    data: str | None,
    sets: list[str] | None,
    resume: Path | None,
    base: config.Recipe | None = None,
) -> tuple[config.Recipe, config.Device]:
    """Recipe, then the device's how, then the options; a resumed run starts from what it was made with, its base."""
    profile = load_device(device or "auto")
    if resume is not None and (resume / "recipe.yaml").is_file():
        base = config.load_recipe(str(resume / "recipe.yaml"))
    if base is not None:
        chosen = base
        if recipe is not None:
            wanted = config.load_recipe(recipe)
            for part in ("update", "train"):
                setattr(chosen, part, getattr(wanted, part))
            chosen.name = wanted.name
        if device is not None:
            config.use_profile(chosen, profile)
    else:
        chosen, _ = resolve(recipe or "sparse-bp", device or "auto", [])
    if model is not None:
        chosen.model.path = model
    if data is not None:
        chosen.data.path = data
    chosen = config.apply_sets(chosen, sets or [])
    for source in (chosen.model, chosen.data):  # a run can be resumed from another folder
        if source.path and config.exists(source.path):
            source.path = str(config.place(source.path).resolve())
    if chosen.data.heldout and config.exists(chosen.data.heldout):
        chosen.data.heldout = str(config.place(chosen.data.heldout).resolve())
    return chosen, profile


# ---------------------------------------------------------------- plan and search


@command("plan")
def show_plan(
    recipe: RecipeOption = None,
    device: DeviceOption = None,
    model: ModelOption = None,
    data: DataOption = None,
    sets: SetOption = None,
    memory: MemoryOption = None,
    fit: FitOption = False,
    no_network: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """What a run would need: memory by stage and term, time, disk; and how it would fit. Nothing is computed."""
    from edgeft.pipeline.planning import plan_of

    choice, profile = _resolve(recipe, device, model, data, sets, None)
    offline.disable_network_if(no_network, model_source(choice.model.path), choice.data.path, choice.data.heldout)
    found = plan_of(choice, profile, config.parse_size(memory) if memory else profile.budget_bytes, fit)
    if as_json:
        _print_json(found)
        return
    from edgeft.ui.plan import print_plan

    print_plan(out, found)


@command("search")
def find_scheme(
    recipe: RecipeOption = None,
    device: DeviceOption = None,
    model: ModelOption = None,
    data: DataOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The recipe to write.")] = Path("my-recipe.yaml"),
    memory: MemoryOption = None,
    time: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time for training: 30min. [default: what the recipe's own scheme takes]"),
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time for trials of single tensors. [default: a tenth of --time, or 3min]"),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of sample and evolution. [default: 0]")] = None,
    sets: SetOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the search that -o names.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Compute contributions anew, also where they are kept.")
    ] = False,
    no_network: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find what to update: which blocks, tensors and channels bring the most on these rows, within memory and time."""
    from edgeft.arch.check import check_model
    from edgeft.pipeline import prepare
    from edgeft.report.heat_map import write_heat_map
    from edgeft.search import problem
    from edgeft.search.budget import Budget
    from edgeft.search.files import Files
    from edgeft.search.files import command as command_of

    files = Files(output)
    before = files.start(resume)
    choice, profile = _resolve(recipe, device, model, data, sets, None, base=before.recipe if before else None)
    budget = Budget.read(memory, time, measure, profile.budget_bytes, before.budget if before else None)
    number = seed if seed is not None else before.seed if before else 0
    source = model_source(choice.model.path)
    offline.disable_network_if(no_network, source, choice.data.path, choice.data.heldout)
    check_model(source, choice.model.frozen)
    screen = Screen(err if as_json else out)
    with screen:
        screen.line(f"search · recipe {choice.name} · model {Path(source).name}")
        _, train, heldout, _ = prepare.encode(choice)
        with files.noted(choice, budget, number):
            there = None if profile.name == "auto" else profile
            posed = problem.build_problem(choice, train, heldout, budget, number, screen, there, again)
            found = problem.find(posed, number)
    files.finish(choice, found)
    write_heat_map(found, files.picture)
    found["files"] = {"recipe": str(files.recipe), "picture": str(files.picture), "numbers": str(files.numbers)}
    if as_json:
        _print_json(found)
        return
    from edgeft.ui.screen import print_search

    print_search(out, found)
    out.print(
        f"wrote {files.recipe} and {files.picture}\ntrain with it:  {command_of(choice, files.recipe)}",
        soft_wrap=True,
        markup=False,
    )


# ---------------------------------------------------------------- eval


@command("eval")
def evaluate(
    target: Annotated[str, typer.Argument(help="Run folder, GGUF file or Hugging Face folder.")],
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite", "-s", help="qa, choice, classify, perplexity, keep, demo or a YAML file. [default: qa]"
        ),
    ] = None,
    data: DataOption = None,
    base: Annotated[
        str | None, typer.Option(help="What to compare with. [default: the model it was tuned from]")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Score at most so many rows.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Compute anew what is stored with the run.")] = False,
    lm_eval: Annotated[
        list[str] | None,
        typer.Option("--lm-eval", help="A task of lm-evaluation-harness, or its YAML file. May be repeated."),
    ] = None,
    no_network: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """The tuned model beside the base model on the same held-out rows, with the difference and how sure it is."""
    from edgeft.evaluate import compare

    if no_network or not lm_eval:  # the harness fetches its tasks' data
        offline.disable_network_if(no_network, target, data, base, *compare.sources(target))
    if lm_eval and (suite or data):
        raise ConfigError("`--lm-eval` brings its own questions", "leave out --suite and --data")
    screen = Screen(err if as_json else out)
    with screen:
        result = (
            compare.evaluate_harness(target, lm_eval, base, limit, screen)
            if lm_eval
            else compare.evaluate(target, data, base, limit, screen, suite, again)
        )
    if as_json:
        _print_json(result)
    elif lm_eval:
        _print_tasks(result)
    else:
        _print_scores(result)


def _print_tasks(result: dict[str, Any]) -> None:
    table = Table("task", "metric", "base", "tuned")
    for task, values in result["tuned"].items():
        for metric, value in values.items():
            before = ((result["base"] or {}).get(task) or {}).get(metric)
            table.add_row(task, metric, "–" if before is None else f"{before:.4f}", f"{value:.4f}")
    out.print()
    out.print(table)


def _print_scores(result: dict[str, Any]) -> None:
    from edgeft.report.words import METRICS, difference, figure, verdict

    table = Table(title=f"{result['rows']} held-out rows", title_justify="left")
    table.add_column("")
    names = [name for name in METRICS if name in result["tuned"]]
    for name in names:
        table.add_column(METRICS[name], justify="right")
    for who in ("base", "tuned"):
        if result.get(who) is not None:
            table.add_row(who, *(figure(name, result[who].get(name)) for name in names))
    if result.get("difference"):
        table.add_row("change", *(difference(name, result["difference"].get(name)) for name in names))
    out.print()
    out.print(table)
    if result.get("verdict"):
        out.print(verdict(result), markup=False, soft_wrap=True)
    if result.get("changed"):
        counts = result["changed"]
        out.print(f"rows: {counts['better']} better, {counts['worse']} worse, {counts['same']} unchanged")
    for example in result.get("examples", []):
        _print_example(example)
    shown = [example["question"] for example in result.get("examples", [])]
    for example in result.get("worse", [])[:3]:
        if example["tuned"] is not None and example["question"] not in shown:
            _print_example(example, " [red](worse than before)[/]")


def _print_example(example: dict[str, Any], mark: str = "") -> None:
    out.print(f"\n[bold]{_plain(example['question'])[:300]}[/]{mark}")
    out.print(f"  expected  {_plain(example['answers'][0])}")
    for who in ("base", "tuned"):
        if example.get(who) is not None:
            out.print(f"  {who:<8}  {_plain(example[who])[:300]}")


@command()
def report(
    target: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    compare: Annotated[
        list[Path] | None, typer.Option("--compare", metavar="RUN2", help="Another run beside it. May be repeated.")
    ] = None,
    card: Annotated[bool, typer.Option("--md", help="A short model card in Markdown instead.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File. [default: report.html in RUN]")] = None,
    as_json: JsonOption = False,
) -> None:
    """One self-contained HTML file that tells how the run went and what came of it."""
    from edgeft.report import write_card, write_report
    from edgeft.run.folder import Run

    run = Run.open(target)
    others = [Run.open(path) for path in compare or []]
    place = write_card(run, output) if card else write_report(run, others, output)
    if as_json:
        _print_json({"path": str(place), "bytes": place.stat().st_size})
    else:
        out.print(f"wrote {place}", soft_wrap=True)


# ---------------------------------------------------------------- export and chat


@command()
def export(
    target: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    format: Annotated[str, typer.Option(help="gguf, hf or peft.")] = "gguf",
    type: Annotated[
        str | None, typer.Option(help="Type of updated tensors: auto, keep, f16, q8_0, q4_0 … [default: the recipe's]")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File, or folder for hf and peft.")] = None,
    no_network: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the tuned model as one GGUF file (with an Ollama Modelfile), a Hugging Face folder or a PEFT adapter."""
    from edgeft.pipeline import export
    from edgeft.run.folder import Run

    run = Run.open(target)
    offline.disable_network_if(no_network, model_source(run.recipe.model.path))
    place = output or run.path / ("model.gguf" if format == "gguf" else format)
    screen = Screen(err if as_json else out)
    with screen:
        result = export.export(run, format, type or run.recipe.export.type, place, screen)
    if as_json:
        _print_json(result)
    elif format != "gguf":
        out.print(f"wrote {place}", soft_wrap=True)


@command()
def chat(
    target: Annotated[Path, typer.Argument(metavar="RUN|FILE", help="Run folder or GGUF file.")],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Ask one question and stop.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = always the likeliest token.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
) -> None:
    """Talk to the tuned model in the terminal, through llama.cpp."""
    from edgeft.evaluate import chat
    from edgeft.evaluate.chat import Chat

    offline.disable_network()  # a conversation needs nobody else
    with Chat(chat.chat_file(target), system=system, temperature=temperature, max_new=max_tokens) as talk:
        if prompt is not None:
            _answer(talk, prompt)
            return
        out.print("[dim]an empty line or Ctrl-D ends the conversation[/]")
        while True:
            try:
                question = out.input("[bold]> [/]")
            except EOFError:
                return
            if not question.strip():
                return
            _answer(talk, question)


def _answer(talk: Any, question: str) -> None:
    for text in talk.ask(question):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    for notice in talk.notices:
        err.print(f"[dim]{_plain(notice)}[/]")


# ---------------------------------------------------------------- looking around


@command("data")
def show_data(
    file: Annotated[str, typer.Argument(help="File, folder or hub id with rows.")],
    model: ModelOption = None,
    sets: SetOption = None,
    no_network: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """What is in a data file, and what the model would see of it."""
    from edgeft.data.inspect import look
    from edgeft.data.rows import load
    from edgeft.formats.tokenizer import open_tokenizer

    recipe = config.apply_sets(config.Recipe(), [*(sets or [])])
    recipe.data.path = file
    offline.disable_network_if(no_network, model_source(model), file, recipe.data.heldout)
    dataset = load(recipe.data)
    found = look(dataset, open_tokenizer(model_source(model)), recipe.data)
    if as_json:
        _print_json(found)
        return
    from edgeft.ui.screen import print_data

    print_data(out, found)


@command()
def doctor(
    refresh: Annotated[bool, typer.Option(help="Measure again instead of using the cached rates.")] = False,
    as_json: JsonOption = False,
) -> None:
    """This machine: memory, cores, speed, sensors, and the profile that suits it."""
    from edgeft.host.doctor import examine

    found = examine(refresh=refresh)
    if as_json:
        _print_json(found)
        return
    from edgeft.ui.screen import print_doctor

    print_doctor(out, found)


@command()
def recipes() -> None:
    """The shipped recipes."""
    table = Table("recipe", "for")
    for name in config.names("recipe"):
        table.add_row(name, config.load_recipe(name).about)
    out.print(table)


@command()
def devices() -> None:
    """The shipped device profiles."""
    table = Table("device", "machine", "memory", "budget", "cores")
    for name in [*config.names("device"), "auto"]:
        found = load_device(name)
        table.add_row(
            name,
            found.about,
            f"{found.ram_bytes / 2**30:.1f} GiB",
            f"{found.budget_bytes / 2**30:.1f} GiB",
            str(found.cores),
        )
    out.print(table)


@command("cache")
def show_cache(
    clear: Annotated[bool, typer.Option("--clear", help="Take away all that is not in use.")] = False,
    as_json: JsonOption = False,
) -> None:
    """What runs share: the output of frozen blocks, so that a second run on the same rows starts at once."""
    from edgeft.host import cache

    root = cache.trunks()
    roots = [folder for folder in (root, cache.searches()) if folder] if clear else []
    cleared_all = [cache.clear(folder) for folder in roots]  # what searches found out goes, too
    freed, kept = (sum(counts) for counts in zip(*cleared_all, strict=True)) if roots else (0, 0)
    rows = cache.listing(root) if root else []
    if as_json:
        cleared = {"freed_bytes": freed} if clear else {}
        _print_json({"folder": str(root), "bytes": sum(row["bytes"] for row in rows), **cleared, "entries": rows})
        return
    if clear:
        out.print(f"freed {freed / 2**20:.1f} MiB" + (f"; {kept} in use and kept" if kept else ""))
        return
    from edgeft.ui.screen import print_cache

    print_cache(out, str(root), rows)


@command()
def runs(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FOLDER | rm RUN…]", help="Where runs lie [default: runs]; or runs to take away."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Take away without asking.")] = False,
    as_json: JsonOption = False,
) -> None:
    """The runs in a folder, newest last: what was trained, and what it brought. `rm` takes runs away for good."""
    if what and what[0] == "rm":
        _remove_runs(what[1:], yes, as_json)
        return
    if what and len(what) > 1:
        raise ConfigError(f"`edgeft runs` takes one folder, not {len(what)}", "`edgeft runs rm RUN…` takes runs away")
    folder = Path(what[0]) if what else Path("runs")
    from edgeft.config import format_duration, format_size
    from edgeft.report.summary import summary
    from edgeft.report.words import METRICS
    from edgeft.run.folder import runs as find

    rows = [summary(run) for run in find(folder)]
    if as_json:
        _print_json(rows)
        return
    table = Table(Column("run", overflow="fold"), "recipe", "model", "rows", "held-out score", "memory", "time")
    for row in rows:  # a name is what the next command is told: never cut
        score, loss = row["score"], row["best_loss"]
        exit_on_error = row["state"]
        if score is not None:
            exit_on_error = f"{METRICS[score['metric']]} {_arrow(score['metric'], score['base'], score['tuned'])}"
        elif loss is not None:
            exit_on_error += f", loss {_arrow('loss', row['base_loss'], loss)}"
        table.add_row(
            row["run"],
            row["recipe"],
            row["model"].removesuffix(".gguf"),
            "" if row["train_rows"] is None else str(row["train_rows"]),
            exit_on_error,
            "" if row["peak_bytes"] is None else format_size(row["peak_bytes"]),
            "" if row["seconds"] is None else format_duration(row["seconds"]),
        )
    out.print(table if rows else f"no runs in {folder}")


def _remove_runs(names: list[str], yes: bool, as_json: bool) -> None:
    from edgeft.run.folder import Run

    if not names:
        raise ConfigError("`edgeft runs rm` needs the runs to take away", "for example `edgeft runs rm quickstart`")
    places = [Path(name) if os.sep in name or Path(name).exists() else Path("runs") / name for name in names]
    for place in places:
        Run.check_removable(place)
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError("nothing was taken away: there is nobody to ask", "say --yes")
        if not typer.confirm(f"take away {', '.join(map(str, places))}, with all that was trained?"):
            return
    freed = {str(place): Run.remove(place) for place in places}
    if as_json:
        _print_json({"removed": freed})
        return
    for name, size in freed.items():
        out.print(f"took away {name} ({size / 2**20:.1f} MiB)", soft_wrap=True)


def _arrow(metric: str, before: float | None, after: float | None) -> str:
    from edgeft.report.words import figure

    return f"{figure(metric, before)} → {figure(metric, after)}"


if __name__ == "__main__":
    app()
