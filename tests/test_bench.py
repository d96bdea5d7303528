"""The benchmark: its arithmetic on made-up events, and once for real on a few rows of the handbook."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import bench
import bench_figures as figures
import bench_meter as meter
import bench_peers as peers
import common
import pytest
from bench_figures import BenchError

PAIR = ("question", "answer")
FIELDS = (
    "name", "seconds", "seconds_to_reference", "peak_bytes", "heldout_loss", "f1", "exact_match", "share_of_gemm",
    "curve", "settings", "tokens", "versions",
)  # fmt: skip


def result(name: str, curve: list[list[float]], **more: Any) -> dict[str, Any]:
    made = {
        "name": name, "seconds": curve[-1][0], "seconds_to_reference": None, "peak_bytes": 2**30, "f1": 50.0,
        "heldout_loss": min(loss for _, loss in curve), "exact_match": 40.0, "share_of_gemm": None, "curve": curve,
        "comparable": name != "mlx-lm",
    }  # fmt: skip
    return {**made, **more}


def test_when_a_curve_reaches_a_loss() -> None:
    curve = [[10.0, 4.0], [20.0, 2.0], [30.0, 2.5], [40.0, 1.0]]
    assert figures.reaches(curve, 3.0) == 15.0
    assert figures.reaches(curve, 2.0) == 20.0
    assert figures.reaches(curve, 1.75) == 35.0  # the rise in between is passed over
    assert figures.reaches(curve, 5.0) == 10.0
    assert figures.reaches(curve, 0.9) is None
    assert figures.reaches([], 1.0) is None


def test_validations_are_not_on_the_clock() -> None:
    events = [
        {"event": "scheme", "time": 103.0},
        {"event": "validation", "time": 110.0, "step": 0, "heldout_loss": 4.0, "seconds": 5.0},
        {"event": "step", "time": 114.0, "step": 1, "tokens": 10, "seconds": 4.0},
        {"event": "validation", "time": 117.0, "step": 1, "heldout_loss": 3.0, "seconds": 3.0},
        {"event": "step", "time": 121.0, "step": 2, "tokens": 20, "seconds": 4.0},
        {"event": "validation", "time": 123.0, "step": 2, "heldout_loss": 2.0, "seconds": 2.0},
    ]
    assert figures.make_curve(events, 100.0) == [[5.0, 4.0], [9.0, 3.0], [13.0, 2.0]]
    assert figures.make_curve(events, 100.0, extra_s=2.5)[-1] == [15.5, 2.0]
    assert figures.tokens(events) == 30
    # without `seconds`: since the step before; for the first one, the median of the others
    bare = [{k: v for k, v in e.items() if k != "seconds" or e["event"] == "step"} for e in events]
    assert figures.validation_seconds(bare) == [2.5, 3.0, 2.0]


def test_step_rate_needs_the_work_of_every_step() -> None:
    steps = [{"event": "step", "seconds": 2.0, "flops": 3e9}, {"event": "step", "seconds": 1.0, "flops": 3e9}]
    assert figures.step_gflops(steps) == pytest.approx(2.0)
    assert figures.step_gflops([*steps, {"event": "step", "seconds": 1.0}]) is None
    assert figures.step_gflops([]) is None


def test_new_results_replace_old_ones_and_are_measured_against_the_reference() -> None:
    reference = result("peft-lora", [[10.0, 4.0], [100.0, 1.0]])
    old, new = result("edgeft", [[5.0, 4.0], [9.0, 3.0]]), result("edgeft", [[5.0, 4.0], [25.0, 0.0]])
    assert [r["seconds_to_reference"] for r in figures.merge([reference], [old])] == [100.0, None]
    merged = figures.merge([old, reference], [new, result("mlx-lm", [[1.0, 4.0], [2.0, 0.5]])])
    assert [r["name"] for r in merged] == ["peft-lora", "mlx-lm", "edgeft"]
    assert [r["seconds_to_reference"] for r in merged] == [100.0, None, 20.0]
    assert figures.merge([], [new])[0]["seconds_to_reference"] is None


def test_the_reference_is_the_fastest_peer_on_the_same_rows() -> None:
    exact = result("peft-lora", [[10.0, 4.0], [100.0, 1.0]])
    half = result("peft-lora-bf16", [[10.0, 4.0], [60.0, 2.0]])
    few = result("mlx-lm", [[1.0, 4.0], [2.0, 0.5]])
    tuned = result("edgeft", [[4.0, 4.0], [8.0, 0.0]])
    assert figures.reference([exact, tuned]) is exact
    assert figures.reference([exact, half, few, tuned]) is half
    assert figures.reference([few, tuned]) == {}
    # a faster peer that joins later moves the goal for all of them
    before = figures.merge([], [exact, tuned])
    assert [r["seconds_to_reference"] for r in before] == [100.0, 7.0]
    assert [r["seconds_to_reference"] for r in figures.merge(before, [half])] == [70.0, 60.0, 6.0]


def test_earlier_results_need_the_same_settings(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert figures.earlier(out, {"rows": 8}) == []
    kept = [result("peft-lora", [[1.0, 2.0]])]
    out.write_text(json.dumps({"settings": {"rows": 8}, "results": kept}))
    assert figures.earlier(out, {"rows": 8}) == kept
    with pytest.raises(BenchError, match="rows 8 → 16"):
        figures.earlier(out, {"rows": 16})
    with pytest.raises(BenchError, match="seed None → 0"):
        figures.earlier(out, {"rows": 8, "seed": 0})
    out.write_text("[]")
    with pytest.raises(BenchError, match="no result of this script"):
        figures.earlier(out, {"rows": 8})


def test_table() -> None:
    rows = [
        result("peft-lora", [[10.0, 4.0], [100.0, 1.0]], peak_bytes=4 * 2**30, share_of_gemm=0.31),
        result("mlx-lm", [[1.0, 4.0], [2.0, 0.5]], f1=None, exact_match=None),
        result("edgeft", [[5.0, 4.0], [25.0, 0.0]], f1=51.5, share_of_gemm=0.5, share_of_fp32_gemm=0.99),
    ]
    lines = figures.table(figures.merge([], rows)).splitlines()
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines[2:]}
    assert cells["peft-lora (reference)"][:5] == ["100.0", "100.0", "1.000", "4.00", "1.000"]
    assert cells["peft-lora (reference)"][-2:] == ["31 %", ""]
    assert cells["edgeft"] == [
        "25.0",
        "20.0",
        "0.200",
        "1.00",
        "0.250",
        "0.0000",
        "51.5",
        "+1.5",
        "40.0",
        "50 %",
        "99 %",
    ]
    assert cells["mlx-lm"][1:3] == ["", ""]
    assert len({line.count("|") for line in lines}) == 1


def test_banking_rows(tmp_path: Path) -> None:
    for name in ("train", "test"):
        lines = [f'"How, {name} {i}?",label_number_{i % 3}' for i in range(30)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,category", *lines]) + "\n")
    folder = common.banking_rows(tmp_path, tmp_path / "rows", 10, 5, PAIR)
    train, dev = ([json.loads(line) for line in (folder / f"{n}.jsonl").open()] for n in ("train", "dev"))
    assert (len(train), len(dev)) == (10, 5)
    assert {row["answer"] for row in train} == {"label number 0", "label number 1", "label number 2"}
    assert all(row["question"].startswith("How, test") for row in dev)
    again = common.banking_rows(tmp_path, tmp_path / "again", 10, 5, PAIR)
    assert (again / "train.jsonl").read_bytes() == (folder / "train.jsonl").read_bytes()
    (tmp_path / "test.csv").write_text("a,b\n1,2\n")
    with pytest.raises(common.Failed, match="no columns"):
        common.banking_rows(tmp_path, tmp_path / "third", 10, 5, PAIR)


def rows_of(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return common.read_rows(folder / "train.jsonl"), common.read_rows(folder / "dev.jsonl")


def test_distinct_keeps_one_question_per_passage(tmp_path: Path) -> None:
    for name, passages in (("train", 12), ("dev", 6)):
        rows = [{"context": f"{name} {i % passages}", "question": f"{i}?", "answers": ["a"]} for i in range(60)]
        common.write_rows(tmp_path / f"{name}.jsonl", rows)
    train, dev = rows_of(common.distinct_passages(tmp_path, tmp_path / "all", 99, 99))
    assert {row["context"] for row in train} == {f"train {i}" for i in range(12)}
    assert (len(train), len(dev)) == (12, 6)
    assert [int(row["question"][:-1]) for row in train] != sorted(int(row["question"][:-1]) for row in train)
    some = rows_of(common.distinct_passages(tmp_path, tmp_path / "some", 8, 3))
    assert some == (train[:8], dev[:3])
    chosen = rows_of(common.distinct_passages(tmp_path, tmp_path / "chosen", 8, 3, choose=True))
    assert chosen == (train[:8], train[-3:])
    with pytest.raises(common.Failed, match="more than the 12 there are"):
        common.distinct_passages(tmp_path, tmp_path / "none", 10, 3, choose=True)
    common.write_rows(tmp_path / "dev.jsonl", [{"question": "?", "answer": "a"}])
    with pytest.raises(common.Failed, match="without a `context`"):
        common.distinct_passages(tmp_path, tmp_path / "none", 8, 3)


def test_settings_are_chosen_on_training_rows(tmp_path: Path) -> None:
    rows = [{"question": f"{i}?", "answer": "\u2028"} for i in range(20)]
    common.write_rows(tmp_path / "train.jsonl", rows)
    assert rows_of(common.last_rows(tmp_path, tmp_path / "rows", 10, 5)) == (rows[:10], rows[-5:])
    for name in ("train", "test"):
        lines = [f"{name} {i},label" for i in range(20)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,category", *lines]) + "\n")
    final, _ = rows_of(common.banking_rows(tmp_path, tmp_path / "final", 20, 5, PAIR))
    train, dev = rows_of(common.banking_rows(tmp_path, tmp_path / "chosen", 10, 5, PAIR, choose=True))
    assert (train, dev) == (final[:10], final[-5:])


def test_peers_are_declared_once() -> None:
    assert (*peers.PEFT, "mlx-lm", "edgeft") == figures.NAMES
    assert set(bench.PACKAGES) == set(figures.NAMES)
    assert {name for name, peer in peers.PEFT.items() if peer.quantised} == {n for n in peers.PEFT if "qlora" in n}
    assert {name for name, peer in peers.PEFT.items() if peer.checkpointing} == {n for n in peers.PEFT if "check" in n}
    assert (peers.PEFT["peft-lora"].bf16, peers.PEFT["peft-lora-bf16"].bf16) == (False, True)
    assert peers.PEFT["peft-qlora"].bf16 == meter.compiled.multiplies_bf16()
    assert [peers.PEFT[name].bf16 for name in bench.DEFAULT[:-1]] == [peers.BF16]


@pytest.mark.parametrize(
    "peer", [peers.PEFT["peft-lora"], peers.PEFT["peft-lora-bf16"], peers.Peer(False, bf16=True, checkpointing=True)]
)
def test_bf16_is_autocast_on_the_cpu(peer: peers.Peer, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    base = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=32))
    linear = base.model.layers[0].self_attn.q_proj
    seen: list[torch.dtype] = []
    linear.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}]
    more = {"data_collator": peers.collate, "train_dataset": rows}
    peers.make_trainer(peer, model, tmp_path, {"max_steps": 1}, **more).train()
    assert seen == [torch.bfloat16 if peer.bf16 else torch.float32] * (2 if peer.checkpointing else 1)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    trained = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert all(p.abs().sum() > 0 for p in trained)
    peers.heldout_loss(model, rows)
    assert seen[-1] == torch.float32  # held-out losses are in float32


def test_qlora_still_learns_after_a_validation(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=32)).save_pretrained(tmp_path)
    base = peers.load_base(peers.PEFT["peft-qlora"], str(tmp_path))
    peers.keep_differentiable(base)
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}]
    peers.heldout_loss(model, rows)
    model(**peers.collate(rows)).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_peers_validate_when_edgeft_does() -> None:
    from edgeft.config import TrainConfig
    from edgeft.train.loop import Schedule

    for rows, epochs, times in ((1000, 3.0, 12), (16, 2.0, 12), (100, 0.5, 4)):
        schedule = Schedule(rows, TrainConfig(epochs=epochs, validations=times))
        assert peers.moments(schedule.steps, times) == schedule.validate_after()


def test_padding() -> None:
    batch = peers.pad([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [-100]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [-100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_memory_is_that_of_the_whole_tree() -> None:
    hold = "b = bytearray(80 << 20); import time; time.sleep(1.5)"
    both = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {hold!r}]); {hold}; p.wait()"
    tree = meter.Tree([sys.executable, "-c", both])
    assert tree.exit_code == 0
    assert tree.seconds > 1.5
    assert 160 << 20 < tree.peak_bytes < 400 << 20


def run_bench(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, bench.__file__, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_wrong_calls(tmp_path: Path) -> None:
    done = run_bench("--out", tmp_path / "out.json", "--data", tmp_path / "none")
    assert done.returncode == 1
    assert "error: there is no folder" in done.stderr
    done = run_bench("--out", tmp_path / "out.json", "--set", "data.system=hello")
    assert done.returncode == 1
    assert "leave out --set data.system=hello" in done.stderr
    train = tmp_path / "train.csv"
    train.write_text("text,category\na,b\n")
    (tmp_path / "test.csv").write_text(train.read_text())
    done = run_bench("--out", tmp_path / "out.json", "--data", tmp_path, "--distinct", "--choose")
    assert done.returncode == 1
    assert "--distinct has no effect" in done.stderr
    assert "more than the 1 there are" in done.stderr
    assert not (tmp_path / "out.json").exists()


@pytest.mark.slow
def test_bench_runs_and_goes_on_with_the_reference(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    quick = ["--rows", 8, "--dev-rows", 2, "--epochs", 2, "--set", "update.blocks=24-27", "--out", out]
    done = run_bench(*quick, "--only", "peft-lora")
    assert done.returncode == 0, done.stderr
    (lora,) = json.loads(out.read_text())["results"]
    assert 0 <= lora["f1"] <= 100
    assert 0 < lora["share_of_gemm"] < 1
    assert lora["heldout_loss"] < lora["curve"][0][1]
    assert lora["seconds_to_reference"] == pytest.approx(lora["curve"][-1][0], abs=0.01)

    done = run_bench(*quick, "--only", "edgeft")
    assert done.returncode == 0, done.stderr
    assert "| edgeft |" in done.stdout
    found = json.loads(out.read_text())
    kept, tuned = found["results"]
    assert kept == lora
    assert tuned["name"] == "edgeft"
    assert found["gemm_gflops"] > 1
    for r in (lora, tuned):
        assert set(FIELDS) <= set(r)
        assert len(r["curve"]) == 3  # before, and after each of two steps
        seconds = [point[0] for point in r["curve"]]
        assert 0 < seconds[0] < seconds[1] < seconds[2] <= r["seconds"]
        assert r["heldout_loss"] == min(loss for _, loss in r["curve"][1:])
        assert r["peak_bytes"] > 200 << 20
        assert 0 <= r["exact_match"] <= 100
    # the same model on the same rows: equal before training
    assert lora["curve"][0][1] == pytest.approx(tuned["curve"][0][1], rel=0.01)
    if find_spec("matplotlib"):
        assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
