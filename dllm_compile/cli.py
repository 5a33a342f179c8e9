# SPDX-License-Identifier: Apache-2.0
"""The command line: generate, report, eval, bench and demo, on the bundled model unless `--model` is given."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from . import __version__, _checkpoints
from ._decoding_options import add_decoding_options, decoding_config
from .config import Cache, CompileConfig, Precision
from .errors import ConfigError, DllmCompileError
from .evaluate import FAMILIES

if TYPE_CHECKING:
    from .optimized import OptimizedModel


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (0 done, 1 refused with a reason, 2 wrong usage, 130 interrupted)."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except DllmCompileError as error:
        print(f"dllm-compile: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands; every command sets `run`."""
    parser = argparse.ArgumentParser(
        prog="dllm-compile", description="Rewrite, compile and decode masked-diffusion language models."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = _command(commands, "generate", _generate, "decode a prompt")
    generate.add_argument("prompt", metavar="PROMPT", nargs="+", help="one or more prompts; - reads one from stdin")
    generate.add_argument(
        "--stream", action="store_true", help="show the canvas while it denoises: one prompt, in a terminal"
    )
    generate.add_argument("--stats", action="store_true", help="print forwards and tokens per forward to stderr")
    generate.add_argument("--no-chat", action="store_true", help="give the prompt as it is, without a chat template")
    add_decoding_options(generate)

    report = _command(commands, "report", _report, "say what is rewritten and what it saves")
    report.add_argument("--json", action="store_true", help="print the report as JSON")
    report.add_argument("--dump", metavar="DIR", help="write the graphs before and after each pass there")
    report.add_argument("--html", metavar="DIR", help="the same with the steps' programs; open DIR/index.html")
    report.add_argument(
        "--caches",
        nargs="+",
        choices=get_args(Cache),
        default=["none", "dual"],
        help="with --html: caches whose steps are shown [none dual]",
    )

    evaluate = _command(commands, "eval", _evaluate, "accuracy on the bundled model's held-out problems")
    evaluate.add_argument("--family", default="arithmetic", choices=FAMILIES, help="problem family [arithmetic]")
    evaluate.add_argument("-n", "--problems", type=int, default=500, help="how many [500]")
    evaluate.add_argument("--batch-size", type=int, default=50, help="prompts decoded together [50]")
    evaluate.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_decoding_options(evaluate)

    bench = _command(commands, "bench", _bench, "speed against the plain loop and torch.compile alone, on this device")
    bench.add_argument("--prompt-lengths", type=int, nargs="+", metavar="INT", help="one table for each [problems]")
    bench.add_argument("--prompts", metavar="FILE", type=Path, help="a file with one prompt a line")
    bench.add_argument("--batch", type=int, help="prompts decoded together [1; all of --prompts]")
    bench.add_argument("--rounds", type=int, default=3, help="each runs everything once; medians are shown [3]")
    bench.add_argument("--no-baselines", action="store_true", help="do not run the plain loops")
    bench.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_decoding_options(bench)

    demo = commands.add_parser("demo", help="the whole path on the bundled model", description="The main job, shown.")
    demo.set_defaults(run=_demo)
    demo.add_argument("--problems", type=int, default=4, help="held-out word problems to decode [4]")
    demo.add_argument("--threshold", type=float, default=0.9, help="confidence of the parallel run [0.9]")
    demo.add_argument("--device", help="cpu, cuda, ... [the first GPU, else cpu]")
    demo.add_argument("--no-compile", action="store_true", help="run the rewritten graph without torch.compile")
    return parser


def _command(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, run: object, text: str):  # type: ignore[no-untyped-def]
    """A command that loads a model."""
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(run=run)
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="PATH", help="folder of a checkpoint [the bundled small model]")
    group.add_argument("--dtype", choices=sorted(_checkpoints.DTYPES), help="dtype of the parameters [the file's]")
    group.add_argument("--device", help="cpu, cuda, ... [the first GPU, else cpu]")
    group.add_argument("--trust-remote-code", action="store_true", help="use the modelling code in the folder")
    group.add_argument("--no-compile", action="store_true", help="run the rewritten graph without torch.compile")
    group.add_argument(
        "--precision",
        choices=get_args(Precision),
        default="checkpoint",
        help="fp8 multiplies feed-forward layers in FP8, auto does where the card can [checkpoint]",
    )
    return parser


def _load(arguments: argparse.Namespace) -> tuple[_checkpoints.Checkpoint, OptimizedModel]:
    """The checkpoint and its rewritten model, as the options ask."""
    from .api import optimize

    checkpoint = _checkpoints.load(
        arguments.model,
        dtype=arguments.dtype,
        device=arguments.device,
        trust_remote_code=arguments.trust_remote_code,
    )
    return checkpoint, optimize(checkpoint.model, _compile_config(arguments))


def _compile_config(arguments: argparse.Namespace) -> CompileConfig:
    return CompileConfig(compile=False if arguments.no_compile else None, precision=arguments.precision)


def _generate(arguments: argparse.Namespace) -> int:
    config = decoding_config(arguments)  # before the model is loaded: a contradiction is said at once
    if arguments.stream and len(arguments.prompt) > 1:
        raise ConfigError(f"--stream shows one prompt, not {len(arguments.prompt)}: decode them one at a time")
    prompts = [sys.stdin.read() if text == "-" else text for text in arguments.prompt]
    checkpoint, fast = _load(arguments)
    ids = [checkpoint.encode(prompt, chat=not arguments.no_chat) for prompt in prompts]
    streamer = None
    if arguments.stream and sys.stdout.isatty():  # a canvas is redrawn in place; a file or a pipe gets the answer
        from .runtime.streamers import CanvasStreamer

        streamer = CanvasStreamer(checkpoint.tokenizer)
    output = fast.generate(ids, config, streamer=streamer)
    if streamer is None:
        for answer in output.answers or ():
            print(checkpoint.tokenizer.decode(answer, skip_special_tokens=True))
    if arguments.stats:
        print(output.stats, file=sys.stderr)
    return 0


def _report(arguments: argparse.Namespace) -> int:
    folders = {"--dump": arguments.dump, "--html": arguments.html}
    for option, folder in folders.items():  # before the model is loaded
        if folder:
            _make_folder(option, folder)
    checkpoint, fast = _load(arguments)
    if arguments.html:
        for cache in arguments.caches:  # a program is made when it is first needed: two tokens behind one will do
            fast.generate([[0]], max_new_tokens=2, block_length=1, eos="none", cache=cache)
    if arguments.json:
        print(json.dumps(fast.report().to_dict(), indent=2))
    else:
        print(checkpoint.name)
        fast.report().show()
    for folder in filter(None, folders.values()):
        fast.dump_graphs(folder)
        print(f"graphs written to {folder}: open {Path(folder) / 'index.html'}", file=sys.stderr)
    return 0


def _make_folder(option: str, path: str) -> None:
    """A folder that can be written to, or a `ConfigError`."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} needs a folder, and {path} cannot be one: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path}: no permission to write there, give another folder")


def _evaluate(arguments: argparse.Namespace) -> int:
    from .evaluate import evaluate

    config = decoding_config(arguments)
    checkpoint, fast = _load(arguments)
    result = evaluate(
        fast,
        checkpoint.tokenizer,
        config,
        family=arguments.family,
        problems=arguments.problems,
        batch_size=arguments.batch_size,
        progress=sys.stderr.isatty(),
    )
    print(json.dumps(result.to_dict(), indent=2) if arguments.json else result)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from .bench.command import run

    return run(arguments, decoding_config(arguments), _compile_config(arguments), print)


def _demo(arguments: argparse.Namespace) -> int:
    from .demo import run

    return run(
        problems=arguments.problems,
        threshold=arguments.threshold,
        device=arguments.device,
        compile=False if arguments.no_compile else None,
    )


if __name__ == "__main__":
    sys.exit(main())
