"""Answer questions about a context in batches, and show the answers with their times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from hf_sparse_attn.cli.context.prompt import pad_left
from hf_sparse_attn.cli.greedy import end_of_sequence_ids
from hf_sparse_attn.cli.terminal import literal
from hf_sparse_attn.cli.timed import TimedOutput, timed_generate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_sparse_attn import FixedContext, SparseAttentionStats


@dataclass
class Answers:
    """Answers of one side, and the cost of each batch of them."""

    texts: list[str] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    """Of each batch: its questions' prefill."""
    decode_seconds: float = 0.0
    decode_steps: int = 0
    """Steps of all batches; a step makes one token of each answer of a batch."""
    bytes_read: int = 0
    dense_bytes: int = 0

    def add(self, stats: SparseAttentionStats) -> None:
        """Add what the decode steps of a batch read."""
        self.bytes_read += stats.kv_bytes + stats.metadata_bytes
        self.dense_bytes += stats.dense_bytes

    def summary(self) -> dict[str, float | None]:
        """Return the means over batches and steps; None where nothing was decoded."""
        return {
            "first_token_seconds": statistics.fmean(self.first_token_seconds),
            "ms_per_token": 1000 * self.decode_seconds / self.decode_steps if self.decode_steps else None,
            "kv_fraction": self.bytes_read / self.dense_bytes if self.dense_bytes else None,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the answers, their costs and the means."""
        return {**asdict(self), **self.summary(), "first_token_seconds_of_batches": self.first_token_seconds}


def answer_questions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    context: FixedContext,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
    on_step: Callable[[], None],
    on_question: Callable[[], None],
) -> Answers:
    """Answer questions greedily, after two steps that are not timed.

    Parameters
    ----------
    model : PreTrainedModel
        Patched with the context's method.
    tokenizer : PreTrainedTokenizerBase
        The model's.
    context : FixedContext
        What the questions are about.
    prompts : sequence of sequences of int
        Token ids of the questions.
    max_new_tokens : int
        Maximum length of an answer in tokens.
    batch_size : int
        Questions answered at once, over one copy of the context.
    on_step, on_question : callable
        Called after each forward pass, and for each question that is answered.
    """
    import torch

    from hf_sparse_attn import sparse_attention_stats
    from hf_sparse_attn.cache_argument import CACHE

    stop_ids = end_of_sequence_ids(model, tokenizer)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(stop_ids, default=0)

    def answer_batch(batch: Sequence[Sequence[int]], most: int) -> TimedOutput:
        token_ids, mask = (torch.tensor(rows, device=model.device) for rows in pad_left(batch, pad_id))
        cache = context.cache(batch_size=len(batch))
        return timed_generate(model, token_ids, mask, most, on_step, pad_token_id=pad_id, **{CACHE: cache})

    answer_batch(prompts[:batch_size], min(2, max_new_tokens))
    answers = Answers()
    for begin in range(0, len(prompts), batch_size):
        output = answer_batch(prompts[begin : begin + batch_size], max_new_tokens)
        for row in output.new_ids.tolist():
            length = next((place for place, token_id in enumerate(row) if token_id in stop_ids), len(row))
            answers.texts.append(tokenizer.decode(row[:length], skip_special_tokens=True).strip())
            on_question()
        answers.first_token_seconds.append(output.first_token_seconds)
        answers.decode_seconds += output.decode_seconds
        answers.decode_steps += output.new_ids.shape[1] - 1
        answers.add(sparse_attention_stats(model))
    return answers


def answers_table(title: str, questions: Sequence[str], sides: Mapping[str, Answers]) -> Table:
    """Return questions and answers, then the costs, as a table for the terminal."""
    columns = [Column(name, overflow="fold") for name in sides]
    table = Table(Column("", overflow="fold"), *columns, title=literal(title, "table.title"))
    for number, question in enumerate(questions):
        table.add_row(literal(question), *(literal(side.texts[number]) for side in sides.values()))
    table.add_section()
    means = [side.summary() for side in sides.values()]
    table.add_row("time to first token, seconds", *(_number(mean["first_token_seconds"], "{:.2f}") for mean in means))
    table.add_row("decode, ms per token", *(_number(mean["ms_per_token"], "{:.1f}") for mean in means))
    table.add_row("KV cache read per decode step", *(_number(mean["kv_fraction"], "{:.1%}") for mean in means))
    return table


def _number(value: float | None, shape: str) -> str:
    return "-" if value is None else shape.format(value)
