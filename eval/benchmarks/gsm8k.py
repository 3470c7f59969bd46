"""GSM8K (https://arxiv.org/abs/2110.14168): word problems, answered by thousands of tokens of reasoning."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from eval.benchmarks.base import Benchmark, Item, Sample, Setup
from eval.data_files import first_file, noted
from eval.errors import EvalError
from eval.examples import read_jsonl
from eval.fetch import fetch_file, github_url
from eval.prompts import encode_prompt
from eval.protocols import load_protocol
from hf_sparse_attn.cli.models import cache_dir

REPOSITORY = "openai/grade-school-math"
COMMIT = "3101c7d5072418e28b9008a6636bde82a006892c"
PATH = "grade_school_math/data/test.jsonl"
SHA256 = "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"
_OFFICIAL_NAMES = {"cot": "gsm8k_cot", "zeroshot": "gsm8k_cot_zeroshot"}
_BETWEEN_SHOTS = "\n\n"


class GSM8K(Benchmark):
    """Short problems with long answers, almost all of whose tokens a method has chosen from by the end."""

    name: ClassVar[str] = "gsm8k"
    summary: ClassVar[str] = "GSM8K: short problems whose answers are thousands of tokens of reasoning"
    tasks: ClassVar[tuple[str, ...]] = ("cot", "zeroshot")
    default_tasks: ClassVar[tuple[str, ...]] = ("zeroshot",)
    protocol: ClassVar[str | None] = "gsm8k"
    options: ClassVar[dict[str, Any]] = {"new_tokens": 4096, "least_tokens": 0}

    def items(self, setup: Setup) -> list[Item]:
        """Return an item for each task and problem."""
        if setup.lengths:
            raise EvalError(f"lengths={list(setup.lengths)} is not allowed: gsm8k's problems have their own")
        new_tokens, least = (setup.option(name, self.options[name]) for name in ("new_tokens", "least_tokens"))
        for name, value, lowest in (("new_tokens", new_tokens, 1), ("least_tokens", least, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise EvalError(f"{name}={value!r} is not allowed: a whole number, at least {lowest}")
        if least > new_tokens:
            raise EvalError(f"least_tokens={least} is not allowed: at most new_tokens={new_tokens}")
        if new_tokens >= setup.max_positions:
            raise EvalError(
                f"new_tokens={new_tokens} is not allowed: fewer than the model's {setup.max_positions} positions; give "
                "--set new_tokens=N"
            )
        values = load_protocol("gsm8k", setup.protocol_dir).values["tasks"]
        examples = read_jsonl(_find(setup.data_dir), ("question", "answer"), _check)[: setup.limit]
        return [
            Item(task, str(number), partial(_build, setup, values[_OFFICIAL_NAMES[task]], example, new_tokens, least))
            for task in setup.tasks
            for number, example in enumerate(examples)
        ]


def _find(data_dir: Path | None) -> Path:
    """Return the official file: in the data folder or its subfolder ``gsm8k``, else in the cache, else fetched."""
    if (found := first_file(data_dir, ("gsm8k/test.jsonl", "test.jsonl"))) is not None:
        return found
    url = github_url(REPOSITORY, COMMIT, PATH)
    file = cache_dir() / "sources" / "gsm8k" / COMMIT / "test.jsonl"
    fetch_file("gsm8k", url, file, "name a folder that has gsm8k/test.jsonl with --data-dir", SHA256)
    return noted(file, "gsm8k/test.jsonl")


def _check(problem: dict[str, Any], place: str) -> None:
    question, answer = problem["question"], problem["answer"]
    if not isinstance(question, str) or not isinstance(answer, str) or "####" not in answer:
        raise EvalError(f"{place}: question and answer must be texts, and the answer must have its number after ####")


def _build(setup: Setup, task: dict[str, Any], example: dict[str, Any], new_tokens: int, least: int) -> Sample:
    environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    template = environment.from_string(task["doc_to_text"])
    shots = [f"{template.render(shot)} {shot['target']}{_BETWEEN_SHOTS}" for shot in task["shots"]]
    question = template.render(example)
    material_ids, question_ids = encode_prompt(
        setup.tokenizer, "".join(shots) + question, len(question), chat=setup.chat
    )
    total = len(material_ids) + len(question_ids) + new_tokens
    if total > setup.max_positions:
        raise EvalError(
            f"prompt and answer may have {total} tokens, more than the model's {setup.max_positions} positions; "
            "set new_tokens"
        )
    return Sample(
        material_ids=material_ids,
        question_ids=question_ids,
        references=example["answer"].rpartition("####")[2].strip(),
        max_new_tokens=new_tokens,
        stop_texts=tuple(task["generation_kwargs"]["until"]),
        min_new_tokens=least,
    )
