# SPDX-License-Identifier: Apache-2.0
"""Accuracy against speed on the bundled model's held-out problems; writes the figures and the README's table.

    python benchmarks/small_model.py               measure, write results/small_model.json and the table
    python benchmarks/small_model.py --render      write the table from the committed figures
    python benchmarks/small_model.py -n 20 --out /tmp/figures.json    a short run elsewhere
    python -m benchmarks small-model -n 20 --json /tmp/figures.json   the same rows in the form of the other cases

The figures do not depend on the machine, up to rounding: every decoding configuration is a fixed algorithm in fp32 on
a fixed list of problems. Wall time is recorded with the machine's name and is not part of the table.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "small_model.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- table: benchmarks/results/small_model.json -->\n", "<!-- end of table -->"

FAMILIES = ("arithmetic", "code", "prose")
CONFIGS: dict[str, dict[str, Any]] = {
    "one token a step": {},
    "two tokens a step": {"steps": 64},
    "threshold 0.95": {"threshold": 0.95},
    "threshold 0.9": {"threshold": 0.9},
    "threshold 0.7": {"threshold": 0.7},
    "factor 1.0": {"factor": 1.0},
    "Fréchet margin 0.25": {"frechet_margin": 0.25},
    "threshold 0.9, prefix cache": {"threshold": 0.9, "cache": "prefix"},
    "threshold 0.9, dual cache": {"threshold": 0.9, "cache": "dual"},
    "threshold 0.9, Flash-Cache": {"threshold": 0.9, "cache": "flash"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of what is measured."""
    parser.add_argument("-n", "--problems", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--configs", nargs="+", default=list(CONFIGS), choices=tuple(CONFIGS), metavar="NAME")


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Evaluate every configuration on every family, one row each; prints each as it is done."""
    import dllm_compile
    from dllm_compile.evaluate import evaluate

    compiled = False if arguments.no_compile else None
    fast = dllm_compile.optimize(dllm_compile.models.load_small(device=arguments.device), compile=compiled)
    tokenizer = dllm_compile.models.load_small_tokenizer()
    rows = []
    for family in arguments.families:
        for name in arguments.configs:
            config = dllm_compile.DecodingConfig(**CONFIGS[name])
            found = evaluate(
                fast,
                tokenizer,
                config,
                family=family,
                problems=arguments.problems,
                batch_size=arguments.batch_size,
            )
            print(f"{name} - {found}", flush=True)
            rows.append({"name": name, **found.to_dict()})
    return rows


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The rows, and where they were measured."""
    on_card = arguments.device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name() if on_card else platform.processor() or "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": "float32",
        "rows": run(arguments),
    }


def table(figures: dict[str, Any]) -> str:
    """The README's table."""
    rows = figures["rows"]
    families = list(dict.fromkeys(row["family"] for row in rows))
    counts = {row["problems"] for row in rows}
    setting = f"{counts.pop()} held-out problems a family, fp32, 128 new tokens in blocks of 32"
    lines = [
        f"{setting}; ± is one standard error of the sample.",
        "",
        "| decoding | " + " | ".join(f"{family}: solved, forwards a problem" for family in families) + " |",
        "|---" * (len(families) + 1) + "|",
    ]
    for name in dict.fromkeys(row["name"] for row in rows):
        cells = []
        for family in families:
            (row,) = (row for row in rows if row["name"] == name and row["family"] == family)
            solved = f"{100 * row['accuracy']:.1f} ± {100 * row['accuracy_error']:.1f} %"
            cells.append(f"{solved}, {row['forwards_per_problem']:.1f} ± {row['forwards_error']:.1f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def render(text: str, figures: dict[str, Any]) -> str:
    """`text` with what stands between the marks replaced by the table."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"README.md has no {BEGIN.strip()} ... {END}")
    return before + BEGIN + table(figures) + END + after


def main() -> int:
    """Measure or render, as the options say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_arguments(parser)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--render", action="store_true", help="only write the README's table from --out")
    options = parser.parse_args()
    if not options.render:
        found = measure(options)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.out == RESULTS:
        figures = json.loads(RESULTS.read_text(encoding="utf-8"))
        README.write_text(render(README.read_text(encoding="utf-8"), figures), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
