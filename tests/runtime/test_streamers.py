# SPDX-License-Identifier: Apache-2.0
"""The streamer protocol, transformers' own streamers, and the canvas in a terminal."""

from __future__ import annotations

import io
import itertools
import os

import pytest
import torch
from transformers.generation.streamers import BaseStreamer, TextStreamer

from dllm_compile.config import DecodingConfig
from dllm_compile.errors import ConfigError
from dllm_compile.runtime.engine import decode
from dllm_compile.runtime.streamers import CanvasStreamer, Streamer

from .policies import POLICIES
from .tiny import EOS, FACTS, MASK, CachedPrograms, DensePrograms, ScriptedPrograms, TinyModel, prompts_of


class Letters:
    """Ids are letters, 30 is a line break, 38 is special."""

    mask_token_id = None

    def decode(self, ids, skip_special_tokens=False, **_):
        ids = [ids] if isinstance(ids, int) else ids  # later streamers decode a single token as well
        kept = [int(one) for one in ids if not (skip_special_tokens and int(one) == EOS)]
        return "".join({30: "\n", EOS: "<eos>", MASK: "<mask>"}.get(one, chr(97 + one % 26)) for one in kept)


class Recorder:
    def __init__(self):
        self.events = []

    def put(self, value):
        assert value.device.type == "cpu"
        assert value.dtype == torch.int64
        self.events.append(("put", value.tolist()))

    def end(self):
        self.events.append(("end", None))


class DraftRecorder(Recorder):
    def put_draft(self, value):
        self.events.append(("draft", value.tolist()))


def scripted(answer, prompt=(1, 2)):
    return ScriptedPrograms([*prompt, *answer], [1 - i / 100 for i in range(len(prompt) + len(answer))])


def test_protocol():
    """The prompt, each finished block, the end; the last block is cut behind its stop id."""
    answer = [3, 4, 5, 6, EOS, 7, 8, 9]
    config = DecodingConfig(max_new_tokens=8, block_length=3, check_every=8)
    recorder = Recorder()
    output = decode(scripted(answer), FACTS, [torch.tensor([1, 2])], config, streamer=recorder)
    assert recorder.events == [("put", [[1, 2]]), ("put", [3, 4, 5]), ("put", [6, EOS]), ("end", None)]
    assert output.sequences[0].tolist() == [1, 2, 3, 4, 5, 6, EOS, 7, EOS, EOS]
    assert isinstance(recorder, Streamer)


def test_drafts():
    """After each step the rest of the canvas that has not been put, masks included."""
    recorder = DraftRecorder()
    config = DecodingConfig(max_new_tokens=4, block_length=2, eos="none", check_every=3)
    decode(scripted([3, 4, 5, 6]), FACTS, [torch.tensor([1, 2])], config, streamer=recorder)
    assert recorder.events == [
        ("put", [[1, 2]]),
        ("draft", [[3, MASK, MASK, MASK]]),
        ("put", [3, 4]),
        ("draft", [[MASK, MASK]]),
        ("draft", [[5, MASK]]),
        ("put", [5, 6]),
        ("end", None),
    ]


def test_infilled_prompt_is_put_when_it_is_full():
    recorder = DraftRecorder()
    config = DecodingConfig(max_new_tokens=2, block_length=2, infill=True, threshold=0.1)
    decode(scripted([3, 4], prompt=(1, 7, 2)), FACTS, [torch.tensor([1, MASK, 2])], config, streamer=recorder)
    assert recorder.events == [
        ("put", [[1, 7, 2]]),
        ("draft", [[MASK, MASK]]),
        ("put", [3, 4]),
        ("end", None),
    ]


@pytest.mark.parametrize("eos", ["block", "first", "none"])
@pytest.mark.parametrize("rule", [{}, {"threshold": 0.4}])
def test_streaming_changes_nothing_and_tells_everything(eos, rule):
    model, prompts = TinyModel(seed=2, eos_bias=3.0), prompts_of(5, seed=3)
    config = DecodingConfig(max_new_tokens=20, block_length=6, eos=eos, check_every=4, **rule)
    recorder = DraftRecorder()
    silent = decode(DensePrograms(model), FACTS, prompts, config)
    shown = decode(DensePrograms(model), FACTS, prompts, config, streamer=recorder)
    assert torch.equal(silent.sequences, shown.sequences)
    puts = [value for kind, value in recorder.events if kind == "put"]
    assert puts[0] == [prompts[0].tolist()]
    told = list(itertools.chain(*puts[1:]))
    assert told == shown.sequences[0, 5 : 5 + len(told)].tolist()
    assert told[: len(shown.answers[0])] == shown.answers[0].tolist()
    for kind, value in recorder.events:
        if kind == "draft":
            assert len(value[0]) <= 20


def test_refusals():
    config = DecodingConfig(max_new_tokens=4)
    for streamer in (Recorder(), [Recorder()], [Recorder()] * 3):
        with pytest.raises(ConfigError, match="with 2 prompts: pass a list of streamers, one for each prompt"):
            decode(scripted([1] * 6), FACTS, prompts_of(2, 2), config, streamer=streamer)
    wants_logits = Recorder()
    wants_logits._takes_logits = True
    with pytest.raises(ConfigError, match="logits"):
        decode(scripted([1] * 6), FACTS, prompts_of(2), config, streamer=wants_logits)
    with pytest.raises(ConfigError, match="one canvas, not 2"):
        CanvasStreamer(Letters(), file=io.StringIO()).put(torch.ones(2, 3))
    with pytest.raises(ConfigError, match="one canvas, not 2"):
        CanvasStreamer(Letters(), file=io.StringIO()).put_draft(torch.ones(2, 3))


def test_streamers_of_transformers(capsys):
    answer = [3, 4, 30, 6, EOS, 7]
    config = DecodingConfig(max_new_tokens=6, block_length=3)
    streamer = TextStreamer(Letters(), skip_prompt=True, skip_special_tokens=True)
    assert isinstance(streamer, Streamer)
    assert isinstance(streamer, BaseStreamer)
    decode(scripted(answer), FACTS, [torch.tensor([1, 2])], config, streamer=streamer)
    assert capsys.readouterr().out == "de\ng\n"
    diffusion = pytest.importorskip("transformers.generation.streamers")
    if not hasattr(diffusion, "TextDiffusionStreamer"):
        pytest.skip("this transformers has no diffusion streamer")
    drawn = diffusion.TextDiffusionStreamer(Letters(), skip_prompt=True, skip_special_tokens=True)
    decode(scripted(answer), FACTS, [torch.tensor([1, 2])], config, streamer=drawn)
    assert "d<mask><mask>" in capsys.readouterr().out


# --- the canvas in a terminal ----------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """Just enough of a terminal: text, line breaks, carriage return, cursor up, clear to the end."""

    def __init__(self):
        super().__init__()
        self.lines, self.row, self.column = [""], 0, 0
        self.frames = []

    def isatty(self):
        return True

    def write(self, text):
        i = 0
        while i < len(text):
            if text[i] == "\x1b":
                end = next(k for k in range(i + 2, len(text)) if text[k].isalpha())
                number, command = text[i + 2 : end], text[end]
                if command == "A":
                    self.row -= int(number)
                    assert self.row >= 0
                else:
                    assert command == "J"
                    self.lines[self.row] = self.lines[self.row][: self.column]
                    del self.lines[self.row + 1 :]
                i = end
            elif text[i] == "\r":
                self.column = 0
            elif text[i] == "\n":
                self.row, self.column = self.row + 1, 0
                if self.row == len(self.lines):
                    self.lines.append("")
            else:
                line = self.lines[self.row]
                self.lines[self.row] = line[: self.column] + text[i] + line[self.column + 1 :]
                self.column += 1
            i += 1
        self.frames.append("\n".join(self.lines))
        return len(text)


@pytest.fixture
def size(monkeypatch):
    def set_size(columns, lines):
        monkeypatch.setattr("shutil.get_terminal_size", lambda *_: os.terminal_size((columns, lines)))

    set_size(20, 10)
    return set_size


def test_canvas_in_a_terminal(size):
    terminal = Terminal()
    streamer = CanvasStreamer(Letters(), file=terminal)
    config = DecodingConfig(max_new_tokens=8, block_length=4)
    for _ in range(2):  # a streamer can be used again
        decode(scripted([3, 4, 30, 6, 7, EOS, 8, 9]), FACTS, [torch.tensor([1, 2])], config, streamer=streamer)
    assert terminal.frames[0] == "d" + "░" * 7
    assert "de\n░░░░░" in terminal.frames
    assert "de\ngh" in terminal.frames
    assert "\n".join(terminal.lines) == "de\ngh\nde\ngh\n"
    assert streamer.mask_token_id == MASK, "taken from the model, as the tokenizer has none"


@pytest.mark.parametrize("skip_prompt", [True, False])
@pytest.mark.parametrize("shape", [(4, 10), (7, 3), (2, 2), (80, 24)])
def test_what_stands_in_the_end_is_the_text(size, shape, skip_prompt):
    """Whatever the size of the terminal: wrapped lines, a draft that does not fit, line breaks."""
    size(*shape)
    terminal = Terminal()
    streamer = CanvasStreamer(Letters(), file=terminal, skip_prompt=skip_prompt)
    model, prompts = TinyModel(seed=5), prompts_of(6, seed=3)
    config = DecodingConfig(max_new_tokens=24, block_length=8, threshold=0.5)
    output = decode(DensePrograms(model), FACTS, prompts, config, streamer=streamer)
    shown = output.answers[0].tolist()
    shown = shown if skip_prompt else prompts[0].tolist() + shown
    text = Letters().decode(shown)
    expected = [line[i : i + shape[0]] for line in text.split("\n") for i in range(0, max(len(line), 1), shape[0])]
    assert [line.rstrip("\n") for line in terminal.lines] == [*expected, ""]
    if shape == (80, 24):
        assert any("░" in frame for frame in terminal.frames)


def test_canvas_elsewhere():
    """One line for each finished block, without control characters."""
    file = io.StringIO()
    streamer = CanvasStreamer(Letters(), file=file, skip_prompt=False, mask_token_id=MASK)
    config = DecodingConfig(max_new_tokens=8, block_length=4)
    decode(scripted([3, 4, 30, 6, 7, EOS, 8, 9]), FACTS, [torch.tensor([1, 2])], config, streamer=streamer)
    assert file.getvalue() == "bc\nde\\ng\nh\n"


def test_wide_characters_and_control_characters(size):
    class Wide(Letters):
        def decode(self, ids, **_):
            return "".join("字" if int(one) == 3 else "\x1b" if int(one) == 4 else "a" for one in ids)

    size(4, 10)
    terminal = Terminal()
    streamer = CanvasStreamer(Wide(), file=terminal, mask_token_id=MASK)
    streamer.put(torch.tensor([[1]]))
    streamer.put(torch.tensor([3, 3, 3, 4, 5]))
    streamer.end()
    assert terminal.lines == ["字字", "字 a", ""]


# --- policies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_streaming_of_policies(policy):
    """Told piece by piece, the answer is what comes out without a streamer, infilled prompts included."""
    model = TinyModel(seed=2, eos_bias=3.0, layers=3)
    for prompt in (prompts_of(5, seed=3)[0], torch.tensor([1, MASK, 3, MASK, 4])):
        config = DecodingConfig(max_new_tokens=20, block_length=6, threshold=0.6, infill=True, **POLICIES[policy])
        recorder = DraftRecorder()
        silent = decode(CachedPrograms(model), FACTS, [prompt], config.replace(check_every=3))
        shown = decode(CachedPrograms(model), FACTS, [prompt], config, streamer=recorder)
        assert torch.equal(silent.sequences, shown.sequences)
        puts = [value for kind, value in recorder.events if kind == "put"]
        assert puts[0] == [shown.sequences[0, :5].tolist()]
        told = list(itertools.chain(*puts[1:]))
        assert told == shown.sequences[0, 5 : 5 + len(told)].tolist()
        assert told[: len(shown.answers[0])] == shown.answers[0].tolist()
        assert len(told) <= len(shown.answers[0]) + 1 or EOS in told


VERIFY = {"cache": "flash", "window_length": 5, "lookahead": 4, "track": 6, "commit": "flash_verify", "gamma": 0.1}


@pytest.mark.parametrize("policy", ["none", "dual", "flash", "dkv every 3", "prefix, dpad", "verify"])
@pytest.mark.parametrize("slots", [None, 2])
def test_streaming_of_a_queue(policy, slots):
    """A streamer for each prompt is told what it would be told alone, piece by piece, whoever waits meanwhile."""
    model = TinyModel(seed=2, eos_bias=3.0, layers=3)
    prompts = prompts_of(5, 2, 9, 1, 4, seed=3)
    options = VERIFY if policy == "verify" else POLICIES.get(policy, {})
    config = DecodingConfig(**{"max_new_tokens": 18, "block_length": 6, "threshold": 0.5, **options})
    recorders = [DraftRecorder() for _ in prompts]
    shown = decode(CachedPrograms(model), FACTS, prompts, config.replace(slots=slots), streamer=recorders)
    silent = decode(CachedPrograms(model), FACTS, prompts, config.replace(slots=slots))
    assert torch.equal(silent.sequences, shown.sequences)
    for i, (prompt, recorder) in enumerate(zip(prompts, recorders, strict=True)):
        alone = DraftRecorder()
        decode(CachedPrograms(model), FACTS, [prompt], config.replace(seed=i), streamer=alone)
        assert recorder.events == alone.events
        assert recorder.events[-1] == ("end", None)
        assert [kind for kind, _ in recorder.events].count("end") == 1


def test_a_queue_that_is_cancelled_ends_every_streamer():
    model, prompts = TinyModel(seed=2, layers=3), prompts_of(5, 2, 9, seed=3)
    config = DecodingConfig(max_new_tokens=12, block_length=6, cache="dual", slots=2, eos="none")
    recorders, looks = [Recorder() for _ in prompts], iter([False] * 7 + [True])
    decode(CachedPrograms(model), FACTS, prompts, config, streamer=recorders, cancelled=lambda: next(looks))
    for prompt, recorder, blocks in zip(prompts, recorders, (1, 1, 0), strict=True):
        assert recorder.events[0] == ("put", [prompt.tolist()])
        assert [kind for kind, _ in recorder.events] == ["put"] * (1 + blocks) + ["end"]
