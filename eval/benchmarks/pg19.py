"""PG19: perplexity of books, with the method applied to every scored token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from eval.benchmarks.base import Benchmark, Item, Sample, Setup
from eval.data_files import remembered
from eval.errors import EvalError
from eval.examples import load_hub_dataset
from eval.sources import books, read_book

if TYPE_CHECKING:
    from hf_sparse_attn import SparseMethod

HUB_ID = "emozilla/pg19-test"
REVISION = "c5e39bf32e33f9111323aa68d7d9000d22722035"


class PG19(Benchmark):
    """Perplexity of the last ``scored`` tokens of a book's first ``length`` tokens; ``"all"`` for all but the first.

    The tokens before them are prefilled; the scored ones are fed ``chunk`` at a time. With 1, methods with sparse
    decoding select for each token. Several lengths give perplexity by position.
    """

    name: ClassVar[str] = "pg19"
    summary: ClassVar[str] = "perplexity of books by position, token by token or in chunks"
    tasks: ClassVar[tuple[str, ...]] = ("books",)
    default_lengths: ClassVar[tuple[int, ...]] = (2000,)
    options: ClassVar[dict[str, Any]] = {"scored": 256, "chunk": 1}

    def check_methods(self, methods: Sequence[SparseMethod], setup: Setup) -> None:
        """Raise if tokens are fed in chunks to a method that is sparse in single-token steps only."""
        chunk = setup.option("chunk", self.options["chunk"])
        for method in methods:
            if chunk != 1 and method.sparse_phases == ("decode",):
                raise EvalError(f"chunk={chunk} is not allowed with {method.name}: only 1, since it is dense in chunks")

    def items(self, setup: Setup) -> list[Item]:
        """Return an item for each length and book."""
        scored, chunk = (setup.option(name, self.options[name]) for name in ("scored", "chunk"))
        for name, value, also in (("scored", scored, ", or all"), ("chunk", chunk, "")):
            if (isinstance(value, bool) or not isinstance(value, int) or value < 1) and not (also and value == "all"):
                raise EvalError(f"{name}={value!r} is not allowed: a whole number, at least 1{also}")
        for length in setup.lengths:
            setup.check_length(length)
            if scored == "all" and length < 2:
                raise EvalError(f"length={length} is not allowed with scored=all: at least 2 tokens")
            if scored != "all" and scored >= length:
                raise EvalError(f"scored={scored} must be less than length={length}")
        found = named_books(setup.data_dir, setup.limit)
        return [
            Item(
                "books",
                title,
                partial(_build, setup, read, title, length, length - 1 if scored == "all" else scored, chunk),
                length,
            )
            for length in setup.lengths
            for title, read in found
        ]


def named_books(data_dir: Path | None, limit: int | None) -> list[tuple[str, Callable[[], str]]]:
    """Return names and readers of at most ``limit`` books: from the data folder, else PG19's test set from the hub.

    Raises
    ------
    EvalError
        The folder has no books, or the hub's cannot be loaded.
    """
    if data_dir is not None:
        return [(path.stem, partial(read_book, path)) for path in books(data_dir, limit)]
    return [
        (f"test-{number}", partial(lambda example: str(example["text"]), example))
        for number, example in enumerate(islice(_hub_books(), limit))
    ]


@remembered
def _hub_books() -> Any:
    return load_hub_dataset(
        HUB_ID,
        "test",
        "With --data-dir D, books are read from D/*.txt, D/books/*.txt and D/pg19/*.txt.",
        revision=REVISION,
    )


def _build(setup: Setup, read: Callable[[], str], title: str, length: int, scored: int, chunk: int) -> Sample:
    text = read()[: 16 * length]  # English tokens average fewer than 16 characters
    token_ids = list(setup.tokenizer(text)["input_ids"])[:length]
    if len(token_ids) < length:
        raise EvalError(f"book {title!r} has {len(token_ids)} tokens, fewer than length={length}")
    cut = length - scored
    return Sample(
        material_ids=token_ids[: cut - 1],
        question_ids=token_ids[cut - 1 : cut],
        references=None,
        max_new_tokens=0,
        forced_ids=token_ids[cut:],
        forced_chunk=chunk,
    )
