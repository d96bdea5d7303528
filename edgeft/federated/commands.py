"""`edgeft federate`: serve, join, simulate, status. Each parses its options, calls, and prints.

What a command needs is imported in it: `edgeft --help` loads this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from edgeft import config
from edgeft.config import Options, Recipe, format_size, parse_size, parse_time
from edgeft.errors import ConfigError
from edgeft.formats.source import model_source
from edgeft.host import offline
from edgeft.host.device import load_device
from edgeft.run.folder import Run
from edgeft.run.record import Allowance
from edgeft.ui.console import err, exit_on_error, one_line, out, print_json, print_line, show
from edgeft.ui.results import print_scores
from edgeft.ui.screen import Screen

if TYPE_CHECKING:
    from edgeft.federated.device import Step
    from edgeft.federated.session import Plan

app = typer.Typer(no_args_is_help=True, help="Many devices learn one model; their rows stay where they are.")

PORT = 9092
OWN_KNOBS = ("how.", "governor.")  # what a device may set: all else is the server's

ModelOption = Annotated[str | None, Option("--model", "-m", help="Base model, the same file everywhere.")]
RecipeOption = Annotated[str | None, Option("--recipe", "-r", help="Shipped recipe or YAML file. [default: sparse-bp]")]
RowsOption = Annotated[
    str | None,
    Option(
        "--data",
        "-d",
        help="The server's own rows: they choose what is trained, check the export and score the result.",
    ),
]
RoundsOption = Annotated[int, Option(min=1, max=100_000, help="Rounds.")]
MinOption = Annotated[int, Option("--min-clients", min=1, help="Updates that a round needs.")]
EpochsOption = Annotated[float, Option("--local-epochs", min=0.0, help="Passes of a device over its rows in a round.")]
SendOption = Annotated[
    str, Option("--send", help="`dense`, or the share of the numbers that is trained and sent: `top:1%`.")
]
DpOption = Annotated[
    str | None, Option("--dp", help="Noise of the devices: `epsilon=8,delta=1e-5`, optionally `clip=1`, `noise=1.1`.")
]
RuleOption = Annotated[str, Option("--aggregate", help="mean, trimmed or krum: the last two bear hostile devices.")]
SetOption = Annotated[list[str] | None, Option("--set", help="One knob: `--set train.batch_rows=8`. Repeatable.")]
DeviceOption = Annotated[str | None, Option("--device", help="Device profile or YAML file. [default: this machine]")]
MemoryOption = Annotated[str | None, Option("--memory", metavar="SIZE", help="Memory limit: 1500MiB.")]
ResumeOption = Annotated[bool, Option("--resume", help="Continue the federation in --out.")]
JsonOption = Annotated[bool, Option("--json", help="Print one JSON object on stdout, nothing else.")]


def command(function: Callable[..., None]) -> Callable[..., None]:
    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        with exit_on_error():
            function(*args, **kwargs)

    return app.command()(guarded)


def _allowance(device: str | None, memory: str | None) -> tuple[config.Device, Allowance]:
    profile = load_device(device or "auto")
    return profile, Allowance(profile.name, parse_size(memory) if memory else profile.budget_bytes)


def _steps(allowed: Allowance, to_stderr: bool) -> Step:
    from edgeft.federated.worker import Runner

    def step(run: Run, name: str) -> None:
        with Runner(run, allowed, to_stderr) as runner:
            runner.do(name)

    return step


def _start(folder: Path, options: Options, profile: config.Device, epochs: float, plan: Plan) -> Run:
    from edgeft.federated.session import federated_recipe, start

    recipe = federated_recipe(config.recipe_of(options, profile), epochs)
    offline.disable_network_if(False, model_source(recipe.model.path), recipe.data.path, recipe.data.heldout)
    return start(folder, recipe, plan)


def _print_result(result: dict[str, Any], folder: Path, as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    if result.get("eval"):
        print_scores(out, result["eval"])
    print_line(f"\ntalk to it:  edgeft chat {folder}\nrounds:      edgeft federate status {folder}")


@command
def serve(
    model: ModelOption = None,
    recipe: RecipeOption = None,
    data: RowsOption = None,
    rounds: RoundsOption = 10,
    min_clients: MinOption = 3,
    local_epochs: EpochsOption = 1.0,
    send: SendOption = "top:1%",
    dp: DpOption = None,
    aggregate: RuleOption = "mean",
    folder: Annotated[Path, Option("--out", "-o", help="Run folder.")] = Path("runs/federated"),
    host: Annotated[str, Option(help="Address to listen on; devices use it if it is not 0.0.0.0.")] = "0.0.0.0",
    name: Annotated[str, Option(help="Name or address by which devices reach this machine. [default: its own]")] = "",
    port: Annotated[int, Option(min=1, max=65535, help="Port.")] = PORT,
    wait: Annotated[str, Option(metavar="TIME", help="How long to wait for enough devices.")] = "1h",
    round_time: Annotated[str, Option(metavar="TIME", help="How long to wait for a device's update.")] = "1h",
    device: DeviceOption = None,
    memory: MemoryOption = None,
    sets: SetOption = None,
    resumed: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Lead a federation: prints the command with which devices join, then runs the rounds and exports the result."""
    from edgeft.federated import flower, net
    from edgeft.federated.server import run_rounds
    from edgeft.federated.session import Plan, begin, finish, resume

    flower.require()
    wait_s, round_s = parse_time(wait, "--wait"), parse_time(round_time, "--round-time")
    net.check_port(host, port)
    profile, allowed = _allowance(device, memory)
    step = _steps(allowed, as_json)
    if resumed:
        run = resume(folder)
    else:
        plan = Plan.read(rounds, min_clients, send, dp, aggregate)
        run = _start(folder, Options(recipe, device, model, data, tuple(sets or ())), profile, local_epochs, plan)
    with Screen(err if as_json else out) as screen:
        state = begin(run, step)
        hosts = net.own_hosts(name or ("" if host in ("0.0.0.0", "::") else host))
        identity, _ = net.identity(folder / "net", hosts)
        size = state.terms.sends.bytes_of(state.layout)
        with flower.SuperLink(identity, host, port, state.terms, size).grid() as grid:
            screen.line(
                f"on every device:  edgeft federate join {hosts[0]}:{port} --token {identity.token} --data ROWS"
            )
            fleet = flower.FlowerFleet(grid, screen, wait_s, round_s)
            run_rounds(run, state, fleet, screen)
            fleet.finish(state.final_task().pack())
    _print_result(finish(run, step, allowed, run.recipe.data.path is not None, as_json), folder, as_json)


@command
def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="As `edgeft federate serve` printed it.")],
    data: Annotated[str, Option("--data", "-d", help="This device's rows. They do not leave it.")],
    token: Annotated[str, Option("--token", help="As `edgeft federate serve` printed it.")],
    name: Annotated[str, Option("--name", help="This device's name on the server. [default: its host name]")] = "",
    model: ModelOption = None,
    folder: Annotated[Path | None, Option("--out", "-o", help="Run folder. [default: runs/fed-NAME]")] = None,
    away: Annotated[str, Option(metavar="TIME", help="How long to look for a server that went away.")] = "1h",
    device: DeviceOption = None,
    memory: MemoryOption = None,
    sets: SetOption = None,
) -> None:
    """Take part in a federation: this device's rows stay here, and the change of the trained tensors is sent."""
    import socket

    from edgeft.federated import flower, net
    from edgeft.federated.device import Device, open_device
    from edgeft.federated.join import Membership, check_name, join_when_there, parse_address, take_part

    host, port = parse_address(address)
    flower.require()
    name = check_name(name or socket.gethostname())
    away_s, key = parse_time(away, "--away"), net.Token.parse(token)
    own, allowed = _own_recipe(model, data, device, memory, sets)
    place = folder or Path("runs") / f"fed-{name}"
    membership = Membership(place.with_name(f"{place.name}-key"), host, port, key, name)
    terms = join_when_there(membership, away_s if membership.key.is_file() else 0.0)  # it has been there before
    offline.disable_network_if(False, model_source(own.model.path), own.data.path)
    run = open_device(place, terms, own)
    with Screen(out) as screen:
        noise = f" with noise (epsilon {terms.noise.epsilon:g}, clip {terms.noise.clip:g})" if terms.noise else ""
        screen.line(f"joined {address} as {name}: {terms.rounds} rounds, sends {terms.send}{noise}, run {place}")
        take_part(membership, Device(name, run, terms, _steps(allowed, False)), screen, away_s)
        screen.line("the federation is complete")


def _own_recipe(
    model: str | None, data: str, device: str | None, memory: str | None, sets: list[str] | None
) -> tuple[Recipe, Allowance]:
    for item in sets or []:
        if not item.startswith(OWN_KNOBS):
            raise ConfigError(
                f"`--set {item}`: the server decides what is learned", "a device sets how.… and governor.…"
            )
    profile, allowed = _allowance(device, memory)
    return config.recipe_of(Options(None, device, model, data, tuple(sets or ())), profile), allowed


@command
def simulate(
    data: Annotated[str, Option("--data", "-d", help="Rows, which are split over the devices.")],
    clients: Annotated[int, Option(min=1, max=1000, help="Devices.")] = 8,
    split: Annotated[str, Option(help="`random`, or `by:COLUMN`: equal values on one device.")] = "random",
    heldout: Annotated[str | None, Option(help="The server's rows to score with. [default: none is scored]")] = None,
    model: ModelOption = None,
    recipe: RecipeOption = None,
    rounds: RoundsOption = 10,
    min_clients: MinOption = 1,
    local_epochs: EpochsOption = 1.0,
    send: SendOption = "top:1%",
    dp: DpOption = None,
    aggregate: RuleOption = "mean",
    folder: Annotated[Path, Option("--out", "-o", help="Run folder.")] = Path("runs/simulated"),
    device: DeviceOption = None,
    memory: MemoryOption = None,
    sets: SetOption = None,
    resumed: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """A federation on this machine alone, for trials: the devices take turns, and no network is used."""
    from edgeft.federated.server import run_rounds
    from edgeft.federated.session import Plan, begin, finish, resume
    from edgeft.federated.simulate import LocalFleet, open_devices

    profile, allowed = _allowance(device, memory)
    step = _steps(allowed, as_json)
    if resumed:
        run = resume(folder)
    else:
        plan = Plan.read(rounds, min(min_clients, clients), send, dp, aggregate)
        more = (*(sets or ()), *([f"data.heldout={heldout}"] if heldout else []))
        run = _start(folder, Options(recipe, device, model, data, more), profile, local_epochs, plan)
    with Screen(err if as_json else out) as screen:
        state = begin(run, step)
        own = config.recipe_of(Options(None, device, run.recipe.model.path, data, _own(sets)), profile)
        own = replace(own, data=replace(own.data, rows=run.recipe.data.rows))
        devices = open_devices(folder, state.terms, own, (clients, split), step)
        run_rounds(run, state, LocalFleet(devices, screen), screen)
    _print_result(finish(run, step, allowed, heldout is not None, as_json), folder, as_json)


def _own(sets: list[str] | None) -> tuple[str, ...]:
    return tuple(item for item in sets or () if item.startswith(OWN_KNOBS))


@command
def show_status(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The --out of `edgeft federate serve`.")],
    as_json: JsonOption = False,
) -> None:
    """Rounds, devices, bytes and epsilon of a federation."""
    from edgeft.federated.session import status

    show(status(folder), as_json, _print_status)


app.registered_commands[-1].name = "status"


def _print_status(console: Console, found: dict[str, Any]) -> None:
    console.print(f"{found['run']}: round {found['round']} of {found.get('rounds', '?')}", markup=False)
    if not found["history"]:
        return
    dense = found["dense_bytes"]
    console.print(f"sends {found['send']}, aggregate {found['aggregate']}; dense: {format_size(dense)}", markup=False)
    if found["epsilon"] is not None:
        console.print(f"epsilon {found['epsilon']:.2f} of {found['epsilon_limit']:g}, delta {found['delta']:g}")
    table = Table("device", "rounds", "rows", "bytes a round", "of dense")
    for name, one in found["devices"].items():
        each = one["bytes"] / one["rounds"]
        table.add_row(one_line(name), str(one["rounds"]), str(one["rows"]), f"{each:,.0f}", f"1/{dense / each:.0f}")
    console.print(table)
    for record in found["history"]:
        for remark in record["remarks"]:
            console.print(f"round {record['round'] + 1}: {remark}", markup=False, soft_wrap=True)
