"""What checkpoints and the governor take of a run's time at default settings, measured inside a real run.

    python scripts/bench/overhead.py [--steps N] [--recipe NAME] [--disk FOLDER]

It trains on the embedded model and data. Sensors are those of this machine; where it has none (a virtual machine), a
file tree with a cool processor, a battery and throttle counters stands in, so that there is something to read. Waiting
for heat, battery or schedule is not overhead: there is none here, and it would be shown beside it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import common

from edgeft.host import sensors

BAR, AIM = 3.0, 1.0  # percent
STAND_IN = {
    "class/thermal/thermal_zone0/type": "cpu-thermal",
    "class/thermal/thermal_zone0/temp": "48000",
    "class/thermal/cooling_device0/type": "cpufreq-cpu0",
    "class/thermal/cooling_device0/cur_state": "0",
    "class/power_supply/BAT0/type": "Battery",
    "class/power_supply/BAT0/capacity": "80",
    "class/power_supply/BAT0/status": "Charging",
    "devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "0",
}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, help="of the optimiser [default: the recipe's]")
    parser.add_argument("--recipe", default="sparse-rule")
    parser.add_argument("--disk", type=Path, help="where the run lies [default: the system's temporary folder]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.disk) as place:
        env = {}
        own = bool(sensors.thermometers(sensors.root()))
        if not own:
            for name, text in STAND_IN.items():
                file = Path(place) / "machine/sys" / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text + "\n")
            env["EDGEFT_SYSFS"] = str(Path(place) / "machine")
        run = Path(place) / "run"
        sets = ["how.trunk_place=run"]  # nothing from an earlier run
        sets += [f"train.steps={args.steps}"] if args.steps else []
        options = ["--recipe", args.recipe, "--out", run, "--until", "train"]
        done = common.edgeft_json("finetune", *options, sets=sets, env=env)
        readings = len(common.read_events(run, "governor"))
    seconds = done["seconds"] - sum(done["paused_s"].values())
    parts = {"checkpoints": done["checkpoint_s"], "governor": done["governor_s"]}
    share = 100 * sum(parts.values()) / seconds
    print(
        f"\n{done['steps']} steps, {seconds:.1f} s with trunk and held-out loss; sensors: {'own' if own else 'files'}"
    )
    rows = [(name, f"{spent:.3f}", f"{100 * spent / seconds:.3f} %") for name, spent in parts.items()]
    print(common.table(["part", "seconds", "share"], [*rows, ("both", f"{sum(parts.values()):.3f}", f"{share:.3f} %")]))
    print(f"bar ≤ {BAR:g} %, aim ≤ {AIM:g} %; {readings} lines of the governor in metrics; paused {done['paused_s']}")
    sys.exit(0 if share <= BAR else 1)


if __name__ == "__main__":
    main()
