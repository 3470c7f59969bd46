"""The ``hf-sparse-attn context ask`` command: answer questions about a prepared context."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_sparse_attn import FixedContext, sparse_attention
from hf_sparse_attn.cli import options as common
from hf_sparse_attn.cli.context import options
from hf_sparse_attn.cli.context.answers import Answers, answer_questions, answers_table
from hf_sparse_attn.cli.context.prompt import encode_question
from hf_sparse_attn.cli.loading import load, shown_name
from hf_sparse_attn.cli.progress import stages
from hf_sparse_attn.cli.terminal import fail, print_table, user_errors
from hf_sparse_attn.context.contents import read_contents
from hf_sparse_attn.rope import max_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def ask(
    file: options.File,
    model_name: common.Model,
    questions: options.Questions = None,
    questions_file: options.QuestionsFile = None,
    max_new_tokens: options.MaxNewTokens = 64,
    batch_size: options.BatchSize = 8,
    dense: options.Dense = False,
    revision: common.Revision = None,
    dtype: common.Dtype = None,
    device: common.Device = None,
    as_json: common.AsJson = False,
) -> None:
    """Answer questions about a prepared context, several at once.

    Shows the answers, the time to the first token and per token, and the share of the KV cache read.

    The model must be the one that prepared the context, in the same dtype.
    Progress goes to stderr.
    """
    asked = [*(questions or []), *_read_questions(questions_file)]
    if not asked or not all(question.strip() for question in asked):
        fail("a question is missing: give questions as arguments, or a file with --questions")
    if dtype is not None and dtype not in common.DTYPES:
        fail(f"--dtype {dtype!r} is unknown; allowed: {', '.join(common.DTYPES)}")
    if not file.is_file():
        fail(f"FILE {str(file)!r} cannot be read: no such file")
    with user_errors(ValueError, OSError):
        read_contents(file)  # before the model, which takes longer
        model, tokenizer = load(model_name, dtype, device, revision)
        context = FixedContext.load(file, model)
    prompts = [encode_question(tokenizer, question.strip(), context.notes) for question in asked]
    _check_positions(model, context, max(map(len, prompts)) + max_new_tokens)

    sides = {context.method.name: context, **({"dense": context.retarget(0)} if dense else {})}
    answers: dict[str, Answers] = {}
    with stages() as progress, user_errors(ValueError, TypeError, NotImplementedError):
        for name, side in sides.items():
            with (
                progress.stage(name, len(prompts), "question") as (on_step, on_question),
                sparse_attention(model, side.method),
            ):
                answers[name] = answer_questions(
                    model, tokenizer, side, prompts, max_new_tokens, batch_size, on_step, on_question
                )
    full_name = shown_name(model_name, revision)
    if as_json:
        found = {"model": full_name, "tokens": context.num_tokens, "questions": asked, "batch_size": batch_size}
        found |= {"answers": {name: side.as_json() for name, side in answers.items()}}
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        dtype_name = str(model.dtype).removeprefix("torch.")
        print_table(answers_table(f"{file.name}, {full_name} ({dtype_name}, {model.device})", asked, answers))


def _read_questions(path: Path | None) -> Sequence[str]:
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--questions {str(path)!r} cannot be read: {error}")
    return [line for line in lines if line.strip()]


def _check_positions(model: PreTrainedModel, context: FixedContext, needed: int) -> None:
    available = max_positions(model.config)
    if context.num_tokens + needed > available:
        fail(
            f"context, question and answer take {context.num_tokens} + {needed} tokens; the model has positions for "
            f"{available}"
        )
