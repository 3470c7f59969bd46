"""SCBench (https://arxiv.org/abs/2412.10319): several turns, or several requests, over one shared context."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from eval.benchmarks.base import Benchmark, Item, Sample, Setup
from eval.benchmarks.scbench_prompts import SharedContext, encoded
from eval.errors import EvalError
from eval.examples import load_examples
from eval.protocols import load_protocol

HUB_ID = "microsoft/SCBench"
REVISION = "f43226eed3a026f927a67c60739c228390d959c2"
MODES = ("turns", "requests")
_FILES = {"needles_summary": "summary_with_needles", "needles_passkey": "summary_with_needles"}
_KINDS = {"needles_summary": "scbench_summary", "needles_passkey": "scbench_passkey"}
"""The kind of the turns that a task asks, of a file with several."""
_LETTERS = "ABCD"


class SCBench(Benchmark):
    """SCBench in its two modes: turns of a dialogue with the right answers between them, and separate requests."""

    name: ClassVar[str] = "scbench"
    summary: ClassVar[str] = "SCBench: several turns or requests over one context, which is prefilled once"
    tasks: ClassVar[tuple[str, ...]] = (
        *("kv", "prefix_suffix", "vt", "qa_eng", "qa_chn", "choice_eng", "many_shot", "mf", "summary"),
        *("needles_summary", "needles_passkey"),
    )
    protocol: ClassVar[str | None] = "scbench"
    averages: ClassVar[dict[str, tuple[str, ...]]] = {
        "string retrieval": ("kv", "prefix_suffix", "vt"),
        "semantic retrieval": ("qa_eng", "qa_chn", "choice_eng"),
        "global information": ("many_shot", "mf", "summary"),
    }
    options: ClassVar[dict[str, Any]] = {"mode": "turns", "turns": None}

    def items(self, setup: Setup) -> list[Item]:
        """Return an item for each turn, those of a context together; a length covers the last turn and its answer."""
        prompts = load_protocol("scbench", setup.protocol_dir).values["prompts"]
        mode, most = (setup.option(name, self.options[name]) for name in ("mode", "turns"))
        if mode not in MODES:
            raise EvalError(f"mode={mode!r} is not allowed: {' or '.join(MODES)}")
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise EvalError(f"turns={most!r} is not allowed: a whole number, at least 1, or None for all")
        for requested in setup.lengths:
            setup.check_length(requested)
        lengths: Sequence[int | None] = setup.lengths or (None,)
        items: list[Item] = []
        for task in setup.tasks:
            examples = _examples(setup, task)
            for length in lengths:
                found: list[Item] = []
                for number, example in enumerate(examples):
                    if setup.limit is not None and len(found) >= setup.limit:
                        break
                    turns = tuple(example["multi_turns"][:most])
                    name = f"scbench_{_FILES.get(task, task)}"
                    shared = SharedContext(setup, prompts, name, mode, example["context"], turns, length)
                    found += [
                        Item(
                            task,
                            f"{number}-{place}",
                            partial(_build, shared, place),
                            length,
                            material=str(number),
                            categories={"turn": str(place + 1)},
                        )
                        for place, turn in enumerate(turns)
                        if turn.get("task") == _KINDS.get(task, turn.get("task"))
                    ]
                items += found[: setup.limit]
        return items


def _examples(setup: Setup, task: str) -> list[dict[str, Any]]:
    filename = f"scbench_{_FILES.get(task, task)}.jsonl"
    examples, origin = load_examples(
        filename,
        hub_id=HUB_ID,
        hub_filename=f"data/{filename}",
        data_dir=setup.data_dir,
        benchmark="scbench",
        required=("multi_turns",),
        revision=REVISION,
    )
    for number, example in enumerate(examples):
        turns, context = example["multi_turns"], example.get("context", example.get("input"))
        if not isinstance(context, (str, list)) or not context:
            raise EvalError(f"{origin}: context of example {number} is not a text or a list but {context!r:.80}")
        example["context"] = context
        if not isinstance(turns, list) or not turns:
            raise EvalError(f"{origin}: multi_turns of example {number} is not a list of turns but {turns!r:.80}")
        for place, turn in enumerate(turns):
            _check(task, turn, f"{origin}: turn {place} of example {number}")
    if task == "mf":
        _give_each_column_one_type(examples)
    for example in examples:
        example["context"] = str(example["context"])  # a list of numbers, as the official code prints it
    return examples


def _give_each_column_one_type(examples: Sequence[dict[str, Any]]) -> None:
    """Make all answers floats if one of them is a float, and so the numbers of all contexts.

    The official code reads the examples with ``datasets``, where a column's numbers have one type.
    """
    turns = [turn for example in examples for turn in example["multi_turns"]]
    for rows, field in ((turns, "answer"), (examples, "context")):
        if any(_has_float(row[field]) for row in rows):
            for row in rows:
                row[field] = _with_floats(row[field])


def _has_float(value: Any) -> bool:
    return any(map(_has_float, value)) if isinstance(value, list) else isinstance(value, float)


def _with_floats(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_floats(element) for element in value]
    return float(value) if isinstance(value, int) else value


def _check(task: str, turn: Any, where: str) -> None:
    """Raise if a turn lacks a field that its task needs."""
    needed = ["input", "answer"]
    needed += ["options"] if task == "choice_eng" else []
    needed += ["task"] if task in _KINDS else []
    if not isinstance(turn, dict):
        raise EvalError(f"{where} is {turn!r:.80}, not an object")
    if missing := [name for name in needed if turn.get(name) in (None, "")]:
        raise EvalError(f"{where} lacks {', '.join(missing)}")
    if task == "choice_eng" and (len(turn["options"]) != len(_LETTERS) or turn["answer"] not in turn["options"]):
        raise EvalError(f"{where}: options={turn['options']!r:.80} must be four, with the answer among them")


def _build(shared: SharedContext, place: int) -> Sample:
    found, turn = encoded(shared), shared.turns[place]
    references = turn["answer"]
    if "choice" in shared.name:
        references = [references, _LETTERS[turn["options"].index(references)]]
    return Sample(
        material_ids=found.material_ids,
        question_ids=found.question_ids[place],
        references=references,
        max_new_tokens=shared.new_tokens(place),
        truncated=found.truncated,
    )
