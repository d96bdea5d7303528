"""The commands as a user types them, in processes of their own, on the embedded model and a few rows."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from edgeft import config
from edgeft.cli import app
from edgeft.formats.gguf import GGUF
from edgeft.run.folder import Run
from tests.conftest import Edgeft
from tests.support.rows import small_rows

runner = CliRunner()
SMALL = [
    part
    for s in ("update.blocks=26-29", "train.epochs=4", "train.batch_rows=4", "train.lr=1e-3")
    for part in ("--set", s)
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, edgeft: Edgeft) -> tuple[Path, dict[str, object]]:
    """A small run with all its stages."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    data = small_rows(tmp_path_factory.mktemp("rows"), train=16, heldout=6)
    result = edgeft(
        "finetune", "--recipe", "sparse-bp", "--device", "rpi5", "--data", data, "--out", folder, *SMALL, "--json"
    )
    assert result.returncode == 0, result.stderr
    return folder, json.loads(result.stdout)


@pytest.mark.slow
def test_finetune_leaves_a_whole_run(finished: tuple[Path, dict[str, object]], model: Path) -> None:
    folder, result = finished
    names = {p.name for p in folder.iterdir()}
    assert {
        "recipe.yaml",
        "tokens.npz",
        "metrics.jsonl",
        "best.safetensors",
        "model.gguf",
        "Modelfile",
        "eval.json",
        "report.html",
    } <= names
    assert result["best_loss"] < result["base_loss"]  # type: ignore[operator]
    scores = result["eval"]
    assert isinstance(scores, dict)
    assert scores["rows"] == 6
    assert scores["tuned"]["loss"] < scores["base"]["loss"]
    assert {"exact_match", "f1"} <= set(scores["base"])
    run = Run.open(folder)
    assert run.recipe.how.micro_batch_tokens == 512  # what the device says about how
    assert run.recipe.train.epochs == 4.0
    base, tuned = GGUF.open(model), GGUF.open(folder / "model.gguf")
    changed = {n for n in base.tensors if base.bytes(n).tobytes() != tuned.bytes(n).tobytes()}
    assert changed == {f"blk.{b}.{t}.weight" for b in range(26, 30) for t in _tensors(run)}


def _tensors(run: Run) -> list[str]:
    from edgeft.arch import get

    return [get("llama").linears[t].gguf for t in run.recipe.update.tensors]


@pytest.mark.slow
def test_eval_of_the_run_and_of_its_file_agree(finished: tuple[Path, dict[str, object]], edgeft: Edgeft) -> None:
    folder, result = finished
    in_trainer = json.loads(edgeft("eval", folder, "--json").stdout)
    in_llama = json.loads(edgeft("eval", folder / "model.gguf", "--json").stdout)
    for who in ("base", "tuned"):
        assert in_trainer[who]["loss"] == pytest.approx(in_llama[who]["loss"], abs=0.05)
    stored = result["eval"]
    assert isinstance(stored, dict)
    assert in_llama["tuned"] == pytest.approx(stored["tuned"], abs=0.05)
    limited = json.loads(edgeft("eval", folder / "model.gguf", "--limit", 2, "--json").stdout)
    assert limited["rows"] == 2


@pytest.mark.slow
def test_a_file_elsewhere_finds_the_embedded_base_and_data(
    finished: tuple[Path, dict[str, object]], edgeft: Edgeft, tmp_path: Path
) -> None:
    folder, _ = finished
    made = edgeft("export", folder, "--type", "f16", "-o", tmp_path / "mine.gguf")
    assert made.returncode == 0, made.stderr
    assert "FROM ./mine.gguf\n" in (tmp_path / "Modelfile").read_text()
    found = json.loads(edgeft("eval", tmp_path / "mine.gguf", "--limit", 3, "--json").stdout)
    assert found["rows"] == 3
    assert found["tuned"]["loss"] < found["base"]["loss"]


@pytest.mark.slow
def test_results_are_stored_with_the_run_and_not_computed_twice(
    finished: tuple[Path, dict[str, object]], edgeft: Edgeft
) -> None:
    folder, result = finished
    base = (Path(os.environ["EDGEFT_CACHE"]) / "eval").glob("*/responses.json")
    kept = {p: p.stat().st_mtime_ns for p in [*base, *(folder / "eval").glob("tuned-*.json")]}
    assert len(kept) >= 2
    again = json.loads(edgeft("eval", folder / "model.gguf", "--json").stdout)
    assert again == result["eval"]
    assert kept == {p: p.stat().st_mtime_ns for p in kept}
    fresh = json.loads(edgeft("eval", folder / "model.gguf", "--again", "--json").stdout)
    assert fresh["tuned"] == pytest.approx(again["tuned"], abs=1e-6)
    assert sum(kept[p] != p.stat().st_mtime_ns for p in kept) == 2


@pytest.mark.slow
def test_suites_and_leaks_on_a_run(finished: tuple[Path, dict[str, object]], edgeft: Edgeft) -> None:
    folder, result = finished
    assert result["eval"]["leaks"] == []  # type: ignore[index]
    train = Path(Run.open(folder).recipe.data.path or "") / "train.jsonl"
    leaking = edgeft("eval", folder / "model.gguf", "--data", train, "--limit", 3, "--json")
    assert "3 of 3 held-out rows are also in the training set" in leaking.stderr
    found = json.loads(leaking.stdout)
    assert [leak["kind"] for leak in found["leaks"]] == ["exact"] * 3
    keep = edgeft("eval", folder / "model.gguf", "--suite", "keep", "--limit", 2)
    assert keep.returncode == 0, keep.stderr
    assert "perplexity" in keep.stdout
    unknown = edgeft("eval", folder, "--suite", "nope")
    assert unknown.returncode == 2
    assert "keep" in unknown.stderr


@pytest.mark.slow
def test_chat_answers_from_run_and_file(finished: tuple[Path, dict[str, object]], edgeft: Edgeft) -> None:
    folder, _ = finished
    first = edgeft("chat", folder, "--prompt", "Where does the probe go?", "--max-tokens", 16)
    second = edgeft("chat", folder / "model.gguf", "--prompt", "Where does the probe go?", "--max-tokens", 16)
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip()
    assert first.stdout == second.stdout


@pytest.mark.slow
def test_a_finished_run_is_not_done_again(finished: tuple[Path, dict[str, object]], edgeft: Edgeft) -> None:
    folder, result = finished
    before = {
        p: p.stat().st_mtime_ns for p in folder.iterdir() if p.name in ("tokens.npz", "best.safetensors", "model.gguf")
    }
    again = edgeft("finetune", "--resume", "--out", folder, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == result
    assert before == {p: p.stat().st_mtime_ns for p in before}
    listed = json.loads(edgeft("runs", folder.parent, "--json").stdout)
    assert [row["run"] for row in listed] == ["small"]
    assert listed[0]["state"] == "complete"


@pytest.mark.slow
def test_a_hugging_face_folder_goes_the_whole_way(
    finished: tuple[Path, dict[str, object]], edgeft: Edgeft, tmp_path: Path
) -> None:
    folder, result = finished
    made = edgeft("export", folder, "--format", "hf", "-o", tmp_path / "hf")
    assert made.returncode == 0, made.stderr
    scores = json.loads(edgeft("eval", tmp_path / "hf", "--data", Run.open(folder).recipe.data.path, "--json").stdout)
    stored = result["eval"]
    assert isinstance(stored, dict)
    assert scores["base"] is None
    assert scores["tuned"]["loss"] == pytest.approx(stored["tuned"]["loss"], abs=0.05)
    data = small_rows(tmp_path / "rows", train=8, heldout=3)
    steps = ["--set", "train.steps=3", "--set", "train.batch_rows=4"]
    tuned = edgeft("finetune", "--recipe", "qlora", "-m", tmp_path / "hf", "-d", data, "-o", tmp_path / "run", *steps)
    assert tuned.returncode == 0, tuned.stderr
    assert GGUF.open(tmp_path / "run" / "model.gguf").get_key("edgeft.base") == "hf"
    for run, out in ((tmp_path / "run", tmp_path / "adapter"), (folder, tmp_path / "low-rank")):
        adapter = edgeft("export", run, "--format", "peft", "-o", out)
        assert adapter.returncode == 0, adapter.stderr
        assert (out / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bias-norm", "lora", "qlora", "full"])
def test_every_recipe_trains_exports_and_gets_better(recipe: str, edgeft: Edgeft, tmp_path: Path) -> None:
    data = small_rows(tmp_path / "rows", train=8, heldout=3)
    sets = [part for s in ("train.steps=6", "train.batch_rows=4", "train.lr=1e-3") for part in ("--set", s)]
    sets = sets if recipe != "full" else [*sets[:-1], "train.lr=2e-4"]
    result = edgeft("finetune", "--recipe", recipe, "--data", data, "--out", tmp_path / "run", *sets, "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["eval"]["tuned"]["loss"] < 0.9 * found["eval"]["base"]["loss"]
    assert found["export"]["check"]["top1"] >= 75


def test_looking_around(edgeft: Edgeft, tmp_path: Path) -> None:
    assert "sparse-bp" in edgeft("recipes").stdout
    assert "jetson-orin-nano" in edgeft("devices").stdout
    assert "no runs" in edgeft("runs", cwd=tmp_path).stdout
    found = json.loads(edgeft("doctor", "--json").stdout)
    assert found["gemm"]["gflops"]["fp32"] > 1
    assert found["cpu"]["cores"] >= 1
    shown = edgeft("data", small_rows(tmp_path / "rows"))
    assert "question/answer" in shown.stdout
    assert "⟦Mirel Osk<|im_end|>⟧" in shown.stdout


def test_knobs_lists_every_declared_knob_with_type_default_limits_and_explanation() -> None:
    knobs = {(k["file"], k["key"]): k for k in json.loads(runner.invoke(app, ["knobs", "--json"]).stdout)}
    for file, cls in (("recipe", config.Recipe), ("device", config.Device)):
        for key, field in declared(cls):
            knob = knobs.pop((file, key))
            assert knob["about"] == field.metadata["about"], key
            assert knob["choices"] == list(field.metadata.get("choices", ())), key
            assert (knob["low"], knob["high"]) == (field.metadata.get("low"), field.metadata.get("high")), key
    assert {key for _, key in knobs} == {f"update.parts[].{f.name}" for f in dataclasses.fields(config.PartConfig)}
    shown = " ".join(runner.invoke(app, ["knobs", "WARM"]).stdout.split())
    assert "train.warmup a number, from 0 to 1; default 0.05 share of the steps in which the" in shown
    assert "train.epochs" not in shown
    assert "budget_bytes (device)" in runner.invoke(app, ["knobs", "device"]).stdout


def declared(cls: type[Any], prefix: str = "") -> list[tuple[str, dataclasses.Field[Any]]]:
    """Keys as `--set` takes them."""
    pairs = []
    for field in dataclasses.fields(cls):
        value = getattr(cls(), field.name)
        key = f"{prefix}{field.name}"
        pairs += declared(type(value), f"{key}.") if dataclasses.is_dataclass(value) else [(key, field)]
    return pairs


def test_help_and_version_need_no_heavy_library() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from edgeft.cli import app; "
        "CliRunner().invoke(app, ['--help']); CliRunner().invoke(app, ['recipes']); "
        "print([m for m in ('torch', 'transformers', 'llama_cpp', 'datasets', 'peft') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


@pytest.mark.slow
def test_the_wheel_works_outside_the_repository(tmp_path: Path) -> None:
    top = Path(__file__).parent.parent
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(top)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", str(tmp_path / "site"), str(wheel)], check=True
    )
    site = tmp_path / "site" / "edgeft"
    templates = [f"report/templates/{file.name}" for file in (top / "edgeft/report/templates").iterdir()]
    assert "report/templates/report.html.j2" in templates
    for file in ("engine/kernels.cpp", *templates, "_shipped/eval/keep/text.jsonl", "demo/train.jsonl"):
        assert (site / file).is_file(), file
    code = (
        "import json, edgeft; from edgeft import config; "
        "from edgeft.data import rows; from edgeft.evaluate import score; "
        "d = rows.load(config.DataConfig()); "
        "print(json.dumps([edgeft.__file__, config.names('recipe'), config.names('device'), score.suites(), "
        "len(d.train), len(d.heldout), [config.load_recipe(r).name for r in config.names('recipe')]]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"},
    )
    assert result.returncode == 0, result.stderr
    place, recipes, devices, suites, train, heldout, loaded = json.loads(result.stdout)
    assert place.startswith(str(tmp_path))
    assert {"sparse-bp", "bias-norm", "lora", "qlora", "full"} <= set(recipes)
    assert loaded == recipes
    assert {"rpi5", "rpi5-16gb", "rpi4", "jetson-orin-nano", "laptop-8gb", "laptop-16gb", "mac-m-series"} <= set(
        devices
    )
    assert {"qa", "demo"} <= set(suites)
    assert train >= 5 * heldout * 0.8
    assert heldout >= 60
