# SPDX-License-Identifier: Apache-2.0
"""Seconds of `optimize()` and of the first `generate()`, with empty compile caches and with warm ones.

Each run is a process of its own. The first one starts with empty folders for what Inductor and Triton compile, the
second one finds there what the first one left. Stages are exclusive; "first generate" holds building its programs.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this case."""
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, help="d_model in the place of the shape's; other sizes follow it")
    parser.add_argument("--cache", default="flash")
    parser.add_argument("--precision", help="CompileConfig.precision")
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--caches", type=Path, help="folder for the compile caches, kept; must be empty for cold runs")
    parser.add_argument("--runs", nargs="+", default=["cold", "warm"], help="names of the runs, one process each")


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row of seconds for each run."""
    if arguments.caches is not None:
        return _runs(arguments, arguments.caches)
    with tempfile.TemporaryDirectory() as folder:
        return _runs(arguments, Path(folder))


def _runs(arguments: argparse.Namespace, caches: Path) -> list[dict[str, Any]]:
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    options = {k: v for k, v in vars(arguments).items() if k not in ("case", "json", "commit", "caches", "runs")}
    rows = []
    for name in arguments.runs:
        command = [sys.executable, "-m", "benchmarks.startup", json.dumps(options)]
        start = time.perf_counter()
        output = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if output.returncode:
            raise SystemExit(f"the {name} run failed:\n{output.stderr[-4000:]}")
        row = {"run": name, **json.loads(output.stdout.splitlines()[-1])}
        rows.append({**row, "process": round(time.perf_counter() - start, 2)})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


class _Watch:
    """Seconds by stage; a stage inside another one is not counted twice."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []

    def around(self, module: Any, name: str, stage: str) -> None:
        """Count what `module.name` takes as `stage`."""
        original = getattr(module, name)

        @functools.wraps(original)
        def timed(*given: Any, **options: Any) -> Any:
            return self.call(stage, lambda: original(*given, **options))

        setattr(module, name, timed)

    def call(self, stage: str, function: Any) -> Any:
        """Run `function` and count its seconds."""
        import torch

        self._inside.append(0.0)
        start = time.perf_counter()
        try:
            return function()
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            spent = time.perf_counter() - start
            self.seconds[stage] += spent - self._inside.pop()
            if self._inside:
                self._inside[-1] += spent


def _measure(options: dict[str, Any]) -> dict[str, Any]:
    watch, start = _Watch(), time.perf_counter()
    import torch

    import dllm_compile
    from dllm_compile import api, capture
    from dllm_compile.passes import packing
    from dllm_compile.runtime import programs

    from .models import SHAPES, random_llada

    watch.seconds["import"] = time.perf_counter() - start
    device = "cuda" if torch.cuda.is_available() else "cpu"
    changes = {}
    if options["width"] is not None:
        width, full = options["width"], SHAPES[options["shape"]]
        heads = max(1, width // (full["d_model"] // full["n_heads"]))
        changes = {"d_model": width, "n_heads": heads, "n_kv_heads": heads, "mlp_hidden_size": 3 * width}
    model = watch.call("model", lambda: random_llada(options["shape"], options["layers"], device, **changes))
    prompt = torch.arange(3, 3 + options["prompt_length"])
    # The first forward starts the libraries of the device; that is the model's own start-up.
    with torch.no_grad():
        watch.call("first forward of the model", lambda: model(prompt[None].to(device)))
    for module, name, stage in (
        (capture, "_inner", "capture: forwards of the model"),
        (capture, "_export", "capture: export"),
        (capture, "_clean", "capture: cleaning"),
        (capture, "find_repeated", "capture: comparing layers"),
        (capture, "stamp", "capture: stamping"),
        (capture, "check_metadata", "capture: recorded values"),
        (capture, "_difference", "capture: certificate"),
        (api, "capture", "capture: rest"),
        (api, "run_passes", "passes"),
        (packing, "_carry_out", "packing"),
        (api, "accept_logits", "certificate of the logits"),
        (programs, "run_passes", "passes of programs"),
        (programs, "compile_program", "compiling programs"),
    ):
        watch.around(module, name, stage)
    chosen = {} if options["precision"] is None else {"precision": options["precision"]}
    fast = watch.call("optimize: rest", lambda: dllm_compile.optimize(model, **chosen))
    before = dict(watch.seconds)
    given = {"max_new_tokens": options["new_tokens"], "cache": options["cache"], "eos": "none"}
    output = watch.call("first generate: rest", lambda: fast.generate([prompt], **given))
    between = dict(watch.seconds)
    watch.call("second generate", lambda: fast.generate([prompt], **given))
    setup = ("import", "model", "first forward of the model")
    seconds = {
        "optimize": sum(before.values()) - sum(before[name] for name in setup),
        "first generate": sum(between.values()) - sum(before.values()),
    }
    return {
        "layers": options["layers"],
        "traced": fast._captured.traced,
        "parameters": sum(p.numel() for p in model.parameters()),
        "forwards": output.stats.forwards,
        **{name: round(value, 2) for name, value in seconds.items()},
        "seconds": round(sum(seconds.values()), 2),
        "stages": {name: round(value, 2) for name, value in watch.seconds.items()},
        "programs": {one.name: {"seconds": round(one.seconds, 2), "graphs": one.graphs} for one in fast.programs.built},
        "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else None,
    }


if __name__ == "__main__":
    print(json.dumps(_measure(json.loads(sys.argv[1]))))
