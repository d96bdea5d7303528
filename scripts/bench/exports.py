#!/usr/bin/env python3
"""What is handed over: one run's update as several files, by size and by what they kept.

    scripts/bench/exports.py RUN [--names keep,q8_0,gguf-lora] [--out FILE.json]

RUN is trained (`edgeft finetune --until train`). Each file is written and scored in llama.cpp on the run's held-out
rows. The loss is also given against q8_0's, bytes against the base's, seconds of the export against those of training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import common


def line(one: dict[str, Any], result: dict[str, Any], best: dict[str, Any]) -> list[str]:
    if "error" in one:
        return [one["name"], f"refused: {one['error']}", *[""] * 6]
    return [
        one["name"],
        f"{one['bytes'] / common.MIB:.1f} MiB",
        f"{one['bytes'] / result['base_bytes']:.3f}",
        f"{one['loss']:.4f}",
        f"{one['loss'] / best['loss']:.3f}",
        f"{one['f1']:.1f}",
        f"{one['contains']:.1f}",
        f"{one['seconds']:.0f} s, {one['seconds'] / result['train_seconds']:.2f}",
    ]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--names", default="keep,q8_0,gguf-lora")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = common.edgeft_json("export", args.run, "--compare", args.names)
    best = next((one for one in result["files"] if one["name"] == "q8_0"), result["files"][0])
    titles = ["file", "size", "÷ base", "held-out loss", "÷ q8_0", "F1", "contains answer", "export, ÷ training"]
    print(f"{result['rows']} held-out rows; loss in training {result['trained_loss']:.4f}\n")
    print(common.table(titles, [line(one, result, best) for one in result["files"]]))
    common.write_json(args.out, result)


if __name__ == "__main__":
    main()
