"""RULER's counting tasks: the most common words of a numbered list, and of a text in code words."""

from __future__ import annotations

import math
import string
from random import Random

import torch

from eval.benchmarks.ruler.prompt import Draft, Order, Prompt
from eval.benchmarks.ruler.vocabulary import adjective_noun, all_words

_LONG = 4096
"""Minimum length at which words repeat as often as the task's settings say; below it they repeat less, to fit."""
_SHORT_REPEATS = (6, 1)
_CODE_LETTERS = 6
_TOKENS_PER_CODE_WORD = 50
_FREQUENT_ANSWERS = slice(1, 4)
"""Ranks that the question asks for; rank 0 is shown as dots."""


def common_words(order: Order) -> Draft:
    """Draft a numbered list with ``num_cw`` words ``freq_cw`` times each, and the others ``freq_ucw`` times.

    A worked example precedes it. The unit is a distinct word. Lists that exhaust the word lists, from about 100,000
    tokens on, continue with adjective-noun pairs.
    """
    common_count, rng = order.args["num_cw"], order.rng
    if order.length < _LONG:
        (example_words, *example_repeats), repeats = (20, 3, 1), _SHORT_REPEATS
    else:
        (example_words, *example_repeats), repeats = (40, 10, 3), (order.args["freq_cw"], order.args["freq_ucw"])
    example_list = rng.sample(all_words(), example_words)
    listed = _numbered(_repeated(example_list, common_count, example_repeats[0], example_repeats[1], rng))
    example = order.template.fill(listed, query="")
    example_text = f"{example.text}{example.answer_prefix} {_numbered(example_list[:common_count])}\n"

    words = rng.sample(all_words(), len(all_words()))
    seed = rng.getrandbits(64)

    def render(size: int) -> Prompt:
        size_rng = Random(seed)
        chosen = words[:size]
        pairs: dict[str, None] = {}
        while len(chosen) + len(pairs) < size:
            pairs[adjective_noun(size_rng)] = None
        listed = _repeated([*chosen, *pairs], common_count, *repeats, size_rng)
        return order.template.fill(_numbered(listed), query="").after(example_text)

    return Draft(render, smallest=common_count + 1, step=max(1, 100 // repeats[1]), references=words[:common_count])


def _repeated(words: list[str], common_count: int, common: int, uncommon: int, rng: Random) -> list[str]:
    listed = words[:common_count] * common + words[common_count:] * uncommon
    rng.shuffle(listed)
    return listed


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def frequent_words(order: Order) -> Draft:
    """Draft a text of code words whose frequencies fall with their rank to the power ``alpha`` (a zeta distribution).

    The vocabulary has a word per 50 tokens of the prompt, without the answer. The unit is a word of the text, before
    counts are rounded down.
    """
    alpha, rng = float(order.args["alpha"]), order.rng
    prompt_tokens = order.length - order.template.tokens_to_generate
    vocabulary_size = max(_FREQUENT_ANSWERS.stop + 1, prompt_tokens // _TOKENS_PER_CODE_WORD)
    vocabulary: dict[str, None] = {}
    while len(vocabulary) < vocabulary_size:
        vocabulary["".join(rng.choices(string.ascii_lowercase, k=_CODE_LETTERS))] = None
    words = ["...", *list(vocabulary)[1:]]
    shares = zeta_shares(vocabulary_size, alpha)
    last_asked = _FREQUENT_ANSWERS.stop - 1
    shuffle_seed = rng.getrandbits(64)

    def render(size: int) -> Prompt:
        text = [word for word, share in zip(words, shares, strict=True) for _ in range(int(size * share))]
        Random(shuffle_seed).shuffle(text)
        return order.template.fill(" ".join(text), query="")

    return Draft(
        render,
        # From this size on, rounded counts rank the last requested word above the next one.
        smallest=math.ceil(1 / (shares[last_asked] - shares[last_asked + 1])),
        step=100,
        references=words[_FREQUENT_ANSWERS],
    )


def zeta_shares(count: int, alpha: float) -> list[float]:
    """Return the shares of ranks 1 to ``count`` in a zeta distribution: rank to the power ``-alpha``, over zeta."""
    zeta = float(torch.special.zeta(torch.tensor(alpha, dtype=torch.float64), torch.ones((), dtype=torch.float64)))
    return [rank**-alpha / zeta for rank in range(1, count + 1)]
