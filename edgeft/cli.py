"""The commands: each parses its options, calls one function and hands the result to ui/.

A user's mistake ends with `error:` and `hint:` on stderr and its own exit code; a bug keeps its traceback.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from edgeft import __version__, config
from edgeft.config import Options
from edgeft.errors import ConfigError, RunError
from edgeft.federated.commands import app as federate
from edgeft.formats.source import model_source
from edgeft.host import cache, cluster, offline
from edgeft.host.device import load_device
from edgeft.pipeline import finetune as pipeline
from edgeft.run import folder as run_folder
from edgeft.run.folder import Run
from edgeft.run.record import Allowance
from edgeft.ui import listing
from edgeft.ui.console import err, exit_on_error, one_line, out, print_json, print_line, show
from edgeft.ui.results import print_compared, print_scores, print_search, print_tasks
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
app.add_typer(federate, name="federate")

ModelOption = Annotated[str | None, Option("--model", "-m", help="GGUF file, Hugging Face folder or hub id.")]
DataOption = Annotated[str | None, Option("--data", "-d", help="File, folder or hub id with rows.")]
SetOption = Annotated[
    list[str] | None, Option("--set", help="One knob: `--set train.lr=2e-4`. Repeatable; `edgeft knobs` lists them.")
]
RecipeOption = Annotated[str | None, Option("--recipe", "-r", help="Shipped recipe or YAML file. [default: sparse-bp]")]
DeviceOption = Annotated[str | None, Option(help="Device profile or YAML file. [default: auto, this machine]")]
MemoryOption = Annotated[
    str | None, Option(metavar="SIZE", help="Memory that a run may use: 1500MiB. [default: the device's budget]")
]
FitOption = Annotated[bool, Option("--fit", help="Train fewer channels, tensors or blocks if needed to fit.")]
OfflineOption = Annotated[bool, Option("--offline", help="Open no socket. Always so when model and data are local.")]
JsonOption = Annotated[bool, Option("--json", help="Print one JSON object on stdout, nothing else.")]
ScheduleOption = Annotated[
    str | None, Option(metavar="TIMES", help="Work only at these times of day, pause otherwise: 22:00-07:00.")
]
ForgetOption = Annotated[
    bool, Option("--no-keep-data", help="Delete tokens and trunk cache at the end: `how.keep_data=false`.")
]
EnforceOption = Annotated[bool, Option("--enforce", help="Enforce the memory limit by a control group, or by ulimit.")]
NodesOption = Annotated[
    str | None,
    Option(metavar="HOSTS", help="Train together with these machines, this one among them: the same command on each."),
]
TimeOption = Annotated[
    str | None, Option(metavar="TIME", help="Training time: 30min. [default: as long as the recipe's own scheme takes]")
]
MeasureOption = Annotated[
    str | None, Option(metavar="TIME", help="Time for trials of single tensors. [default: a tenth of --time, or 3min]")
]
SuiteOption = Annotated[
    str | None, Option("--suite", "-s", help="qa, choice, classify, perplexity, keep, demo or YAML file. [default: qa]")
]
RunArgument = Annotated[Path, Argument(metavar="RUN", help="Run folder.")]


def command(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def register(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> None:
            with exit_on_error():
                function(*args, **kwargs)

        return app.command(*names)(guarded)

    return register


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, Option("--version", help="Print the version.")] = False) -> None:
    if version:
        out.print(f"edgeft {__version__}")
        raise typer.Exit


def _resolve(
    options: Options, no_network: bool, earlier: config.Recipe | None = None
) -> tuple[config.Recipe, config.Device]:
    """The recipe that will run, and the device; no socket is opened from here on, where none is needed."""
    profile = load_device(options.device or "auto")
    recipe = config.recipe_of(options, profile, earlier)
    offline.disable_network_if(no_network, model_source(recipe.model.path), recipe.data.path, recipe.data.heldout)
    return recipe, profile


@command()
def finetune(
    recipe: RecipeOption = None,
    device: DeviceOption = None,
    model: ModelOption = None,
    data: DataOption = None,
    out_folder: Annotated[Path, Option("--out", "-o", help="Run folder. [default: runs/<recipe>]")] = Path(""),
    sets: SetOption = None,
    resume: Annotated[bool, Option("--resume", help="Continue the run in --out.")] = False,
    until: Annotated[str, Option(help="Last stage: prepare, train, export or eval.")] = "eval",
    threads: Annotated[int | None, Option(help="Compute threads. [default: the device's]")] = None,
    schedule: ScheduleOption = None,
    no_keep_data: ForgetOption = False,
    memory: MemoryOption = None,
    fit: FitOption = False,
    enforce: EnforceOption = False,
    nodes: NodesOption = None,
    no_network: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune, export to GGUF, and compare before and after. Default: the embedded model and data."""
    if until not in pipeline.STAGES:
        raise ConfigError(f"unknown stage `{until}`", f"known: {', '.join(pipeline.STAGES)}")
    if nodes:
        cluster.use_nodes(nodes)
    place = cluster.place()
    folder = out_folder if str(out_folder) != "." else Path("runs") / Path(recipe or config.DEFAULT_RECIPE).stem
    folder = folder.with_name(folder.name + place.suffix)
    knobs = {"how.threads": threads, "governor.schedule": schedule, "how.keep_data": False if no_keep_data else None}
    sets = [*(sets or []), *(f"{key}={value}" for key, value in knobs.items() if value is not None)]
    file = folder / "recipe.yaml"
    if (folder / "terms.json").is_file() and not (folder / "done.json").is_file():
        hint = "continue with `edgeft federate serve --resume`, or `simulate --resume`"
        raise RunError(f"{folder} is of a federation that is not complete", hint)
    earlier = config.load_recipe(str(file)) if resume and file.is_file() else None
    chosen, profile = _resolve(Options(recipe, device, model, data, tuple(sets)), no_network, earlier)
    budget = config.parse_size(memory) if memory else profile.budget_bytes
    run = Run.start(folder, chosen, resume)
    name = Path(model_source(chosen.model.path)).name
    Screen(err if as_json else out).line(f"run {folder} · recipe {chosen.name} · model {name}")
    allowed = Allowance(profile.name, budget, fit)
    if place.rank and until != "prepare":
        until = "train"  # the first node exports and evaluates
    result = pipeline.finetune(run, until, allowed, to_stderr=as_json, enforce=enforce)
    if as_json:
        print_json(result)
        return
    if result.get("eval"):
        print_scores(out, result["eval"])
    if "export" in result:
        print_line(f"\ntalk to it:  edgeft chat {folder}\nor:          llama-cli -m {result['export']['path']}")


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
    from edgeft.pipeline.prepare import plan_of
    from edgeft.ui.plan import print_plan

    chosen, profile = _resolve(Options(recipe, device, model, data, tuple(sets or ())), no_network)
    budget = config.parse_size(memory) if memory else profile.budget_bytes
    show(plan_of(chosen, profile, budget, fit), as_json, print_plan)


@command("search")
def search_scheme(
    recipe: Annotated[str | None, Option("--recipe", "-r", help="As for finetune. [default: sparse-search]")] = None,
    device: DeviceOption = None,
    model: ModelOption = None,
    data: DataOption = None,
    output: Annotated[Path, Option("--output", "-o", help="The recipe to write.")] = Path("my-recipe.yaml"),
    memory: MemoryOption = None,
    time: TimeOption = None,
    measure: MeasureOption = None,
    seed: Annotated[int | None, Option(min=0, help="Of the sample and evolution. [default: 0]")] = None,
    sets: SetOption = None,
    resume: Annotated[bool, Option("--resume", help="Continue the search of --output.")] = False,
    again: Annotated[bool, Option("--again", help="Ignore cached contributions and recompute them.")] = False,
    no_network: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find what to update: which blocks, tensors and channels bring the most on these rows, within memory and time."""
    from edgeft.pipeline.prepare import search
    from edgeft.search.files import Budget, Files
    from edgeft.search.files import command as finetune_command
    from edgeft.search.problem import SearchRequest

    files = Files(output)
    before = files.start(resume)
    options = Options(recipe or (None if before else "sparse-search"), device, model, data, tuple(sets or ()))
    chosen, profile = _resolve(options, no_network, before.recipe if before else None)
    budget = Budget.read(memory, time, measure, profile.budget_bytes, before.budget if before else None)
    number = seed if seed is not None else before.seed if before else 0
    request = SearchRequest(chosen, budget, number, None if profile.name == "auto" else profile, again)
    with Screen(err if as_json else out) as screen:
        screen.line(f"search · recipe {chosen.name} · model {Path(model_source(chosen.model.path)).name}")
        result = search(request, files, screen)
    if as_json:
        print_json(result)
        return
    print_search(out, result)
    print_line(f"wrote {files.recipe} and {files.picture}\ntrain with it:  {finetune_command(chosen, files.recipe)}")


@command()
def audit(
    target: Annotated[
        Path | None, Argument(metavar="[RUN]", help="Run folder; else --recipe, --model, --data.")
    ] = None,
    recipe: RecipeOption = None,
    model: ModelOption = None,
    data: DataOption = None,
    sets: SetOption = None,
    rows: Annotated[str, Option(metavar="COUNTS", help="Rows in one gradient.")] = "1,4,16",
    send: Annotated[str, Option(help="dense, or the share of the numbers that is trained and sent: top:1%.")] = "dense",
    dp: Annotated[str | None, Option(help="Clipping and noise: epsilon=8,delta=1e-5 or noise=0.1.")] = None,
    match: Annotated[int, Option(min=0, help="Steps of gradient matching for one row; 0 = none, it is slow.")] = 0,
    no_network: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """What an honest but curious server could read from what this device would send: attacks on your own rows."""
    from edgeft.pipeline.audit import Message, audit
    from edgeft.ui.audit import print_audit

    run = Run.open(target) if target else None
    if run and (recipe or model or data or sets):
        raise ConfigError("a run has its own recipe, model and data", "give RUN alone, or --recipe, --model, --data")
    chosen = run.effective if run else _resolve(Options(recipe, None, model, data, tuple(sets or ())), no_network)[0]
    offline.disable_network_if(no_network, model_source(chosen.model.path))
    with Screen(err if as_json else out) as screen:
        result = audit(run, chosen, Message(rows, send, dp, match), screen)
    show(result, as_json, print_audit)


@command("eval")
def evaluate(
    target: Annotated[str, Argument(help="Run folder, GGUF file or Hugging Face folder.")],
    suite: SuiteOption = None,
    data: DataOption = None,
    base: Annotated[str | None, Option(help="Model to compare with. [default: the model it was tuned from]")] = None,
    limit: Annotated[int | None, Option(min=1, help="Score at most this many rows.")] = None,
    again: Annotated[bool, Option("--again", help="Ignore stored results and recompute them.")] = False,
    lm_eval: Annotated[
        list[str] | None, Option("--lm-eval", help="A task of lm-evaluation-harness, or its YAML file. Repeatable.")
    ] = None,
    no_network: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """The tuned model beside the base model on the same held-out rows, with the difference and its interval."""
    from edgeft.evaluate import compare

    if no_network or not lm_eval:  # the harness downloads its tasks' data
        offline.disable_network_if(no_network, target, data, base, *compare.sources(target))
    if lm_eval and (suite or data):
        raise ConfigError("`--lm-eval` brings its own questions", "leave out --suite and --data")
    with Screen(err if as_json else out) as screen:
        if lm_eval:
            result = compare.evaluate_harness(target, lm_eval, base, limit, screen)
        else:
            result = compare.evaluate(compare.Evaluation(target, data, base, limit, suite, again), screen)
    show(result, as_json, print_tasks if lm_eval else print_scores)


@command()
def report(
    target: RunArgument,
    compare: Annotated[
        list[Path] | None, Option("--compare", metavar="RUN2", help="Another run beside it. Repeatable.")
    ] = None,
    card: Annotated[bool, Option("--md", help="A short model card in Markdown instead.")] = False,
    output: Annotated[Path | None, Option("--output", "-o", help="File. [default: report.html in RUN]")] = None,
    as_json: JsonOption = False,
) -> None:
    """One self-contained HTML file: how the run went, and its results."""
    from edgeft.report.render import write_card, write_report

    run = Run.open(target)
    others = [Run.open(path) for path in compare or []]
    file = write_card(run, output) if card else write_report(run, others, output)
    if as_json:
        print_json({"path": str(file), "bytes": file.stat().st_size})
    else:
        print_line(f"wrote {file}")


@command()
def export(
    target: RunArgument,
    format: Annotated[str, Option(help="gguf, gguf-lora, hf or peft.")] = "gguf",
    type: Annotated[
        str | None, Option(help="Type of updated tensors: auto, keep, f16, q8_0, q4_0 … [default: the recipe's]")
    ] = None,
    output: Annotated[Path | None, Option("--output", "-o", help="File, or folder for hf and peft.")] = None,
    compare: Annotated[
        str | None, Option(metavar="LIST", help="Write and score several, for the report: keep,q5_1,q8_0,gguf-lora.")
    ] = None,
    no_network: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the tuned model as a GGUF file or a GGUF LoRA adapter (with an Ollama Modelfile), a Hugging Face folder or
    a PEFT adapter."""
    from edgeft.pipeline import stages

    run = Run.open(target)
    offline.disable_network_if(no_network, model_source(run.recipe.model.path))
    if compare:
        from edgeft.export.compare import parse_names

        if type or output or format != "gguf":
            raise ConfigError("`--compare` names the types and its own files", "leave out --format, --type and -o")
        names = parse_names(compare)
        with Screen(err if as_json else out) as screen:
            result = stages.compare_exports(run, names, screen)
        show(result, as_json, print_compared)
        return
    place = output or {"gguf": run.model, "gguf-lora": run.adapter}.get(format, run.path / format)
    with Screen(err if as_json else out) as screen:
        result = stages.export(run, format, type or run.recipe.export.type, place, screen)
    if as_json:
        print_json(result)
    elif format in ("hf", "peft"):
        print_line(f"wrote {place}")


@command()
def chat(
    target: Annotated[Path, Argument(metavar="RUN|FILE", help="Run folder or GGUF file.")],
    prompt: Annotated[str | None, Option("--prompt", "-p", help="Ask one question and exit.")] = None,
    system: Annotated[str | None, Option(help="System message.")] = None,
    temperature: Annotated[float, Option(min=0.0, help="0 = greedy: always the most likely token.")] = 0.0,
    max_tokens: Annotated[int, Option(min=1, help="Longest answer.")] = 256,
) -> None:
    """Talk to the tuned model in the terminal, through llama.cpp."""
    from edgeft.evaluate import chat
    from edgeft.evaluate.chat import Chat
    from edgeft.evaluate.llamacpp import Sampling

    offline.disable_network()
    file, adapter = chat.chat_file(target)
    with Chat(file, system, Sampling(max_tokens, temperature), adapter=adapter) as talk:
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
        err.print(f"[dim]{one_line(notice)}[/]")


@command("data")
def show_data(
    file: Annotated[str, Argument(help="File, folder or hub id with rows.")],
    model: ModelOption = None,
    sets: SetOption = None,
    no_network: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """What is in a data file, and what the model would see of it."""
    from edgeft.data.inspect import describe
    from edgeft.data.rows import load
    from edgeft.formats.tokenizer import open_tokenizer

    chosen = dataclasses.replace(config.apply_sets(config.Recipe(), sets or ()).data, path=file)
    offline.disable_network_if(no_network, model_source(model), file, chosen.heldout)
    show(describe(load(chosen), open_tokenizer(model_source(model)), chosen), as_json, listing.print_data)


@command()
def doctor(
    refresh: Annotated[bool, Option(help="Measure again instead of using the cached rates.")] = False,
    as_json: JsonOption = False,
) -> None:
    """This machine: memory, cores, speed, sensors, and the matching device profile."""
    from edgeft.engine.trial import measured
    from edgeft.errors import EdgeftError
    from edgeft.host.doctor import examine

    machine = examine(refresh=refresh)
    machine["products"] = {}
    try:
        machine["products"] = {} if machine["gemm"]["error"] else measured(refresh)
    except EdgeftError as error:  # a compiler that does not compile is a reason to run doctor
        machine["unavailable"].append({"what": "kernels", "why": error.message})
    show(machine, as_json, listing.print_doctor)


@command("knobs")
def show_knobs(
    word: Annotated[str, Argument(metavar="[WORD]", help="Only those with WORD in key or explanation.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Every knob of recipes and device profiles: type, limits, default, explanation."""
    knobs = config.knobs(word)
    if as_json:
        print_json([dataclasses.asdict(knob) for knob in knobs])
    else:
        listing.print_knobs(out, knobs)


@command()
def recipes() -> None:
    """The shipped recipes."""
    listing.print_recipes(out, map(config.load_recipe, config.names("recipe")))


@command()
def devices() -> None:
    """The shipped device profiles."""
    listing.print_devices(out, map(load_device, [*config.names("device"), "auto"]))


@command("cache")
def show_cache(
    clear: Annotated[bool, Option("--clear", help="Delete everything that is not in use.")] = False,
    as_json: JsonOption = False,
) -> None:
    """What runs share: outputs of frozen blocks and answers of base models, for later runs on the same rows."""
    root, parts = cache.folder(), cache.LISTED
    roots = [folder for part in (*parts, "search") if (folder := cache.folder(part))] if clear else []
    cleared = [cache.clear(folder) for folder in roots]
    freed, kept = (sum(counts) for counts in zip(*cleared, strict=True)) if roots else (0, 0)
    rows = [row for part in parts if (folder := cache.folder(part)) for row in cache.listing(folder)]
    if as_json:
        total = sum(row["bytes"] for row in rows)
        freed_bytes = {"freed_bytes": freed} if clear else {}
        print_json({"folder": str(root), "bytes": total, **freed_bytes, "entries": rows})
    elif clear:
        print_line(f"freed {freed / 2**20:.1f} MiB" + (f"; {kept} in use and kept" if kept else ""))
    else:
        listing.print_cache(out, str(root), rows)


@command()
def runs(
    what: Annotated[
        list[str] | None,
        Argument(metavar="[FOLDER | rm RUN…]", help="Folder with runs [default: runs]; or runs to delete."),
    ] = None,
    yes: Annotated[bool, Option("--yes", "-y", help="Delete without asking.")] = False,
    as_json: JsonOption = False,
) -> None:
    """The runs in a folder, newest last, with their scores. `rm` deletes runs for good."""
    from edgeft.report.summary import summary

    if what and what[0] == "rm":
        _remove_runs(what[1:], yes, as_json)
        return
    if what and len(what) > 1:
        raise ConfigError(f"`edgeft runs` takes one folder, not {len(what)}", "`edgeft runs rm RUN…` deletes runs")
    folder = Path(what[0]) if what else Path("runs")
    rows = [summary(run) for run in run_folder.runs(folder)]
    show(rows, as_json, lambda console, rows: listing.print_runs(console, folder, rows))


def _remove_runs(names: list[str], yes: bool, as_json: bool) -> None:
    if not names:
        raise ConfigError("`edgeft runs rm` needs the runs to delete", "for example `edgeft runs rm quickstart`")
    places = [Path(name) if os.sep in name or Path(name).exists() else Path("runs") / name for name in names]
    for place in places:
        Run.check_removable(place)
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError("not deleted: no terminal to confirm on", "pass --yes")
        if not typer.confirm(f"delete {', '.join(map(str, places))}, with everything that was trained?"):
            return
    freed = {str(place): Run.remove(place) for place in places}
    if as_json:
        print_json({"removed": freed})
        return
    for name, size in freed.items():
        print_line(f"deleted {name} ({size / 2**20:.1f} MiB)")


if __name__ == "__main__":
    app()
