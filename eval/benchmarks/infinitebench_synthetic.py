"""InfiniteBench's synthetic tasks, generated at any length in the form of the official examples."""

from __future__ import annotations

import random
import statistics
import uuid
from collections.abc import Callable
from typing import Any

Example = dict[str, Any]
ExampleMaker = Callable[[int], Example]
"""Creates an example with a number of units of filler; more units change only the length."""

# The filler and needles of the official data.
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
PASSKEY = "The pass key is {key}. Remember it. {key} is the pass key.\n"
DIGITS = "The sequence of digits is {key}. Remember it. {key} is the sequence of digits.\n"

# Math.Find: numbers from 0 to 99, of which the largest or the smallest is itself drawn from a fifth of that range.
LARGEST = 99
FIFTH = 20
FEWEST_NUMBERS = 8
RANKS: dict[str, Callable[[list[int]], float]] = {
    "largest": lambda numbers: _ranked(numbers, -1),
    "second largest": lambda numbers: _ranked(numbers, -2),
    "third largest": lambda numbers: _ranked(numbers, -3),
    "smallest": lambda numbers: _ranked(numbers, 0),
    "second smallest": lambda numbers: _ranked(numbers, 1),
    "third smallest": lambda numbers: _ranked(numbers, 2),
    "median": statistics.median,
}

_GOLDEN_RATIO = 0.6180339887498949
_PROBE_UNITS = 16


def needle_depth(task: str, index: int) -> float | None:
    """Return the depth of a sample's answer, 0 to 1, spread evenly over any number of samples; None for Math.Find."""
    return None if task == "math_find" else (index + 0.5) * _GOLDEN_RATIO % 1.0


def example_maker(task: str, seed: int, length: int, index: int) -> ExampleMaker:
    """Return a function that creates a sample's example, the same for the same arguments on every machine.

    Parameters
    ----------
    task : str
        A key of ``MAKERS``.
    seed, length, index : int
        The run's seed, the requested length in tokens, and the sample's number.
    """
    rng = random.Random(f"infinitebench {task} {seed} {length} {index}")
    return MAKERS[task](rng, index)


def most_units(tokens_with: Callable[[int], int], budget: int) -> int:
    """Find the maximum units of filler whose prompt stays within ``budget`` tokens, in a few tries.

    Raises
    ------
    ValueError
        The prompt is longer even without filler.
    """
    bare = tokens_with(0)
    if bare > budget:
        raise ValueError(f"a prompt without filler has {bare} tokens, but only {budget} are allowed")
    per_unit = max(1.0, (tokens_with(_PROBE_UNITS) - bare) / _PROBE_UNITS)
    fits = int((budget - bare) / per_unit)
    step = 1
    while fits > 0 and tokens_with(fits) > budget:
        fits, step = max(0, fits - step), 2 * step
    too_many = fits + 1
    step = 1
    while tokens_with(too_many) <= budget:
        fits, too_many, step = too_many, too_many + step, 2 * step
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if tokens_with(middle) <= budget:
            fits = middle
        else:
            too_many = middle
    return fits


def _passkey(rng: random.Random, index: int) -> ExampleMaker:
    key = "".join(rng.choices("0123456789", k=5))
    return _in_noise("passkey", index, PASSKEY.format(key=key), "What is the pass key?", key)


def _number_string(rng: random.Random, index: int) -> ExampleMaker:
    digits = rng.choices("0123456789", k=5)
    while len(digits) < 10:
        place = rng.randrange(len(digits))
        digits.insert(place, digits[place])
    key = "".join(digits)
    return _in_noise("number_string", index, DIGITS.format(key=key), "What is the sequence of digits?", key)


def _in_noise(task: str, index: int, needle: str, question: str, key: str) -> ExampleMaker:
    depth = needle_depth(task, index) or 0.0

    def make(units: int) -> Example:
        before = round(depth * units)
        return {"context": NOISE * before + needle + NOISE * (units - before), "input": question, "answer": [key]}

    return make


def _kv_retrieval(rng: random.Random, index: int) -> ExampleMaker:
    depth = needle_depth("kv_retrieval", index) or 0.0
    pairs: list[tuple[str, str]] = []

    def make(units: int) -> Example:
        while len(pairs) <= units:
            pairs.append((_random_uuid(rng), _random_uuid(rng)))
        key, value = pairs[int(depth * (units + 1))]
        listing = ", ".join(f'"{k}": "{v}"' for k, v in pairs[: units + 1])
        question = f'\nKey: "{key}"\nThe value associated with the specified key is: '
        return {"context": f"JSON data:\n{{{listing}}}", "input": question, "answer": [value]}

    return make


def _random_uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _math_find(rng: random.Random, index: int) -> ExampleMaker:
    asked = list(RANKS)[index % len(RANKS)]
    low, high = 0, LARGEST
    if "largest" in asked or (asked == "median" and rng.random() < 0.5):
        high -= rng.randrange(FIFTH)
    else:
        low += rng.randrange(FIFTH)
    numbers = rng.sample(range(low, high + 1), FEWEST_NUMBERS)  # distinct, so that a third largest exists

    def make(units: int) -> Example:
        count = FEWEST_NUMBERS + units
        while len(numbers) < count:
            numbers.append(rng.randint(low, high))
        question = f"You should answer with only one number, no other words. The {asked} number of the list is: "
        return {"context": str(numbers[:count]), "input": question, "answer": [RANKS[asked](numbers[:count])]}

    return make


def _ranked(numbers: list[int], rank: int) -> int:
    return sorted(set(numbers))[rank]


MAKERS: dict[str, Callable[[random.Random, int], ExampleMaker]] = {
    "passkey": _passkey,
    "number_string": _number_string,
    "kv_retrieval": _kv_retrieval,
    "math_find": _math_find,
}
"""The tasks that can be generated."""
