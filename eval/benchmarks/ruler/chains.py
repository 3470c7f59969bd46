"""RULER's variable tracking: chains of assignments scattered over repeated lines."""

from __future__ import annotations

import string
from itertools import pairwise
from random import Random

from eval.benchmarks.ruler.needles import NOISE
from eval.benchmarks.ruler.prompt import Draft, Order, Prompt, Template, TokenParts, fit, token_count

_EXAMPLE_TOKENS = 500
"""Most tokens of the worked example, without special tokens and without its answer."""
_EXAMPLE_NAME_LETTERS, _NAME_LETTERS = 3, 5
_EXAMPLE_HOPS = 10


def draft(order: Order) -> Draft:
    """Draft a prompt with ``num_chains`` chains of ``num_hops`` copies each, asking for the variables of the first.

    Every statement is a line of its own, among lines of noise, which are the unit. A worked example of at most 500
    tokens, with names of three letters, precedes it.
    """
    chains, hops, rng = order.args["num_chains"], order.args["num_hops"], order.rng
    example = _chains_draft(order.template, chains, min(hops, _EXAMPLE_HOPS), _EXAMPLE_NAME_LETTERS, rng)
    example_text = _worked_example(order, example)
    question = _chains_draft(order.template, chains, hops, _NAME_LETTERS, rng)
    return Draft(
        lambda size: question.render(size).after(example_text),
        smallest=question.smallest,
        step=question.step,
        references=question.references,
    )


def _worked_example(order: Order, example: Draft) -> str:
    def encode(prompt: Prompt) -> TokenParts:
        return [], order.tokenizer(prompt.text + prompt.answer_prefix, add_special_tokens=False)["input_ids"]

    shortest = token_count(encode(example.render(example.smallest)))
    size, _ = fit(example, max(shortest, _EXAMPLE_TOKENS), encode)
    prompt = example.render(size)
    # RULER puts a blank before the answer, and one blank line behind it.
    return f"{prompt.text}{prompt.answer_prefix} {' '.join(example.references)}\n\n"


def _chains_draft(template: Template, chains: int, hops: int, letters: int, rng: Random) -> Draft:
    names = _names(chains * (hops + 1), letters, rng)
    values = rng.sample(range(10_000, 99_999), chains)  # distinct, so that the answer is one chain
    variables = [names[i * (hops + 1) : (i + 1) * (hops + 1)] for i in range(chains)]
    statements = [_assignments(value, chain) for value, chain in zip(values, variables, strict=True)]
    place_seed = rng.getrandbits(64)

    def render(size: int) -> Prompt:
        place_rng = Random(place_seed)
        lines = [NOISE] * size
        for chain in statements:
            places = sorted(place_rng.sample(range(len(lines)), len(chain)))
            for inserted, (place, statement) in enumerate(zip(places, chain, strict=True)):
                lines.insert(place + inserted, statement)
        return template.fill("\n".join(lines), query=values[0], num_v=hops + 1)

    return Draft(render, smallest=hops + 1, step=20, references=variables[0])


def _assignments(value: int, chain: list[str]) -> list[str]:
    return [f"VAR {chain[0]} = {value}", *(f"VAR {name} = VAR {source} " for source, name in pairwise(chain))]


def _names(count: int, letters: int, rng: Random) -> list[str]:
    names: dict[str, None] = {}  # an ordered set
    while len(names) < count:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    return list(names)
