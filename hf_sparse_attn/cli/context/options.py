"""Options of the ``hf-sparse-attn context`` commands, grouped into the panels of their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_METHOD, _TEXT, _QUESTIONS, _OUTPUT = "Method", "Text", "Questions", "Output"

File = Annotated[Path, typer.Argument(help="A file that `context prepare` wrote.", metavar="FILE", show_default=False)]

TextFile = Annotated[
    Path,
    typer.Option("--text", help="UTF-8 text of the context; - reads stdin.", metavar="FILE", rich_help_panel=_TEXT),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat/--no-chat",
        help="Put text and questions into one user message of the chat template.",
        rich_help_panel=_TEXT,
    ),
]
Output = Annotated[
    Path,
    typer.Option("--output", help="File to write, in the safetensors format.", metavar="FILE", rich_help_panel=_OUTPUT),
]
PerLayer = Annotated[
    bool, typer.Option("--per-layer", help="Show the KV budget of every layer and KV head.", rich_help_panel=_OUTPUT)
]

TargetSparsity = Annotated[
    float,
    typer.Option(
        help="Share of the context's keys that is not read, at least 0 and below 1.",
        metavar="NUMBER",
        rich_help_panel=_METHOD,
    ),
]
Clusters = Annotated[
    float,
    typer.Option(help="Clusters, as a share of the context's tokens.", metavar="NUMBER", rich_help_panel=_METHOD),
]
Levels = Annotated[
    int,
    typer.Option(help="Levels of the lookup: 1, or 2 with coarse clusters.", metavar="NUMBER", rich_help_panel=_METHOD),
]
TokenBudget = Annotated[
    int | None,
    typer.Option(
        help="Maximum tokens of the context that a KV head reads per step.",
        metavar="NUMBER",
        show_default="no maximum",
        rich_help_panel=_METHOD,
    ),
]
Window = Annotated[
    int,
    typer.Option(
        help="Last tokens of the context, which calibrate the threshold and are always read.",
        metavar="NUMBER",
        rich_help_panel=_METHOD,
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the clustering.", metavar="NUMBER", rich_help_panel=_METHOD)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Another parameter of Squeezed, such as iterations=10. Repeatable.",
        metavar="NAME=VALUE",
        rich_help_panel=_METHOD,
    ),
]
ChunkSize = Annotated[
    int,
    typer.Option(
        help="Tokens in a forward pass of the prefill: more take more memory.", metavar="NUMBER", rich_help_panel=_TEXT
    ),
]

Questions = Annotated[
    list[str] | None, typer.Argument(help="Questions about the context.", metavar="[QUESTION]...", show_default=False)
]
QuestionsFile = Annotated[
    Path | None,
    typer.Option(
        "--questions", help="UTF-8 text with a question in each line.", metavar="FILE", rich_help_panel=_QUESTIONS
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option(help="Maximum length of an answer in tokens.", min=1, metavar="NUMBER", rich_help_panel=_QUESTIONS),
]
BatchSize = Annotated[
    int,
    typer.Option(help="Questions answered at once.", min=1, metavar="NUMBER", rich_help_panel=_QUESTIONS),
]
Dense = Annotated[
    bool,
    typer.Option(
        "--dense",
        help="Also answer with the whole context, and compare; centroids are scored too, and count.",
        rich_help_panel=_QUESTIONS,
    ),
]
