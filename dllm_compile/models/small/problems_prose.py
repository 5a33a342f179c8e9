# SPDX-License-Identifier: Apache-2.0
"""Very short stories with free wording: flat confidence, few tokens that are certain."""

from __future__ import annotations

import random
import re

from dllm_compile.models.small.problem import Problem, Split, draw
from dllm_compile.models.small.problems_arithmetic import NAMES

FAMILY = "prose"
THINGS = ("kites", "lanterns", "boats", "drums", "masks", "clocks", "maps", "lamps", "flags", "bells", "jars", "ropes")
PLACES = ("harbour", "forest", "market", "tower", "garden", "bridge", "island", "station", "valley", "library")

_ASK = (
    "Tell a short story about {name}, {n} {things} and the {place}.",
    "Write a few lines: {name}, {n} {things}, the {place}.",
    "What happened to {name} and the {n} {things} at the {place}?",
)
# Three parts; a template is the choice of one schema for each, with the thing and the place.
_OPEN = (
    "{when} {name} carried {n} {things} to the {place}.",
    "{when} {name} went to the {adj} {place} with {n} {things}.",
    "In the {adj} {place} lived {name}, who kept {n} {adj2} {things}.",
    "{name} had always wanted {n} {things}, and {when2} they stood at the {place}.",
)
_MIDDLE = (
    "The {weather} was {adj}, and {animal} {did} {where}.",
    "{animal2} came {where} and {did} until the {weather} {ended}.",
    "Nobody knew why the {things} were so {adj}, but {animal} {did} all the same.",
    "First the {weather} {ended}, then {animal} {did} {where}.",
)
_CLOSE = (
    "In the end {name} smiled and {went}.",
    "{name} counted the {things} once more and {went}.",
    "That evening the {place} was {adj}, and {name} {went}.",
    "Since then {name} is known as the {adj} keeper of the {things}.",
)
_WORDS: dict[str, tuple[str, ...]] = {
    "when": ("One morning", "Last winter", "Long ago", "On a Sunday", "Before dawn", "Late in May"),
    "when2": ("one day", "at last", "by chance", "that spring"),
    "adj": ("old", "quiet", "bright", "strange", "golden", "cold", "empty", "friendly"),
    "adj2": ("small", "heavy", "painted", "broken", "blue", "silver"),
    "weather": ("wind", "rain", "snow", "fog", "storm", "sun"),
    "ended": ("stopped", "grew", "turned", "faded"),
    "animal": ("a fox", "an owl", "a grey cat", "a goat", "a heron", "two dogs"),
    "animal2": ("A fox", "An owl", "A grey cat", "A goat", "A heron", "Two dogs"),
    "did": ("sang", "slept", "waited", "laughed", "danced", "listened"),
    "where": ("near the wall", "under a tree", "by the water", "on the roof", "behind the gate"),
    "went": ("walked home", "fell asleep", "lit a fire", "told everyone", "said nothing", "started again"),
}


def _template(rng: random.Random) -> tuple[int, int, int, str, str]:
    return rng.randrange(4), rng.randrange(4), rng.randrange(4), rng.choice(THINGS), rng.choice(PLACES)


def make(rng: random.Random, split: Split) -> Problem:
    """One story request with one of its many answers."""
    template = draw(FAMILY, "template", split, lambda: _template(rng), str)
    number = draw(FAMILY, "numbers", split, lambda: (rng.randint(2, 99),), str)[0]
    name = rng.choice(NAMES)
    fixed = {"name": name, "n": str(number), "things": template[3], "place": template[4]}
    sentences = [
        schema.format(**fixed, **{slot: rng.choice(words) for slot, words in _WORDS.items()})
        for schema in (_OPEN[template[0]], _MIDDLE[template[1]], _CLOSE[template[2]])
    ]
    return Problem(
        prompt=rng.choice(_ASK).format(**fixed),
        answer=" ".join(sentences),
        family=FAMILY,
        template=str(template),
        numbers=(number,),
        check={"words": tuple(fixed.values())},
    )


def grade(problem: Problem, text: str) -> bool:
    """Whether every word the prompt asked for is in the story, and it is three whole sentences."""
    words = set(re.findall(r"[A-Za-z]+|\d+", text))
    return text.rstrip().endswith(".") and text.count(".") >= 3 and words.issuperset(problem.check["words"])
