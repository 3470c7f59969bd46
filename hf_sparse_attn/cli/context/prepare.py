"""The ``hf-sparse-attn context prepare`` command: prefill and cluster a text, and write it to a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hf_sparse_attn import FixedContext, Squeezed, prepare_context
from hf_sparse_attn.cli import options as common
from hf_sparse_attn.cli.context import options
from hf_sparse_attn.cli.context.prompt import encode_document
from hf_sparse_attn.cli.context.report import Facts, budget_as_json, budget_rows, facts_table, layers_table
from hf_sparse_attn.cli.loading import load, shown_name
from hf_sparse_attn.cli.outputs import may_be_written
from hf_sparse_attn.cli.progress import Stages, stages
from hf_sparse_attn.cli.terminal import fail, parse_settings, print_table, user_errors
from hf_sparse_attn.methods import make_method

T = TypeVar("T")
STDIN = Path("-")
UNITS = {"Prefill": "chunk", "Clustering": "layer"}


def prepare(
    model_name: common.Model,
    text_file: options.TextFile,
    output: options.Output,
    target_sparsity: options.TargetSparsity = Squeezed.target_sparsity,
    clusters: options.Clusters = Squeezed.clusters,
    levels: options.Levels = Squeezed.levels,
    token_budget: options.TokenBudget = Squeezed.token_budget,
    window: options.Window = Squeezed.window,
    seed: options.Seed = Squeezed.seed,
    settings: options.Settings = None,
    chat: options.Chat = False,
    chunk_size: options.ChunkSize = 8192,
    revision: common.Revision = None,
    dtype: common.Dtype = None,
    device: common.Device = None,
    per_layer: options.PerLayer = False,
    as_json: common.AsJson = False,
) -> None:
    """Prefill a text, cluster its keys, and write both to a file.

    Shows sizes, times, and how much of the text each question will read.

    The file can be asked by the same model only.
    Progress goes to stderr.
    """
    text = _read_text(text_file)
    if dtype is not None and dtype not in common.DTYPES:
        fail(f"--dtype {dtype!r} is unknown; allowed: {', '.join(common.DTYPES)}")
    if not may_be_written(output):
        fail(f"--output {str(output)!r} cannot be written: no such folder, or no permission")
    hyperparameters: dict[str, Any] = {
        "target_sparsity": target_sparsity,
        "clusters": clusters,
        "levels": levels,
        "token_budget": token_budget,
        "window": window,
        "seed": seed,
    }
    others = parse_settings("--set", settings or [])
    for name in hyperparameters.keys() & others.keys():
        fail(f"{name} has an option of its own: --{name.replace('_', '-')}")
    with user_errors(ValueError, TypeError):
        make_method(Squeezed.name, **(hyperparameters | others))  # fails before the model is loaded

    with user_errors(ValueError):
        model, tokenizer = load(model_name, dtype, device, revision)
        token_ids, notes = encode_document(tokenizer, text, chat)
    with stages() as progress, user_errors(ValueError, TypeError, NotImplementedError):
        shown = partial(_shown, progress)
        context = prepare_context(model, token_ids, chunk_size=chunk_size, progress=shown, **(hyperparameters | others))
    full_name = shown_name(model_name, revision)
    context = replace(context, notes=notes, identity=context.identity._replace(model_id=full_name))
    with user_errors(OSError):
        context.save(output)

    facts = _facts(context, output)
    if as_json:
        found = {"model": full_name, **facts.as_json(), "budget": budget_as_json(context.budget)}
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    dtype_name = str(model.dtype).removeprefix("torch.")
    rows = budget_rows(context.budget)
    print_table(facts_table(f"{full_name} ({dtype_name}, {model.device})", facts, rows, context.method))
    if per_layer:
        print_table(layers_table(context.budget))


def _shown(progress: Stages, parts: Sequence[T], description: str) -> Iterator[T]:
    """Pass the parts of a stage on, one by one, and show how many are done."""
    with progress.stage(description.lower(), len(parts), UNITS[description]) as (_, advance):
        for part in parts:
            yield part
            advance()


def _facts(context: FixedContext, output: Path) -> Facts:
    metadata = context.layers[0].metadata
    counts: dict[str, Any] = {"clusters": metadata["cluster_sizes"].shape[2]}
    thresholds = {"threshold": float(metadata["threshold"])}
    if context.method.levels == 2:
        counts = {"coarse_clusters": metadata["coarse_sizes"].shape[2], **counts}
        thresholds["coarse_threshold"] = float(metadata["coarse_threshold"])
    return Facts(
        tokens=context.num_tokens,
        layers=len(context.layers),
        kv_heads=context.layers[0].keys.shape[1],
        file=str(output),
        file_bytes=output.stat().st_size,
        counts=counts,
        thresholds=thresholds,
        seconds=context.seconds._asdict(),
    )


def _read_text(path: Path) -> str:
    try:
        text = sys.stdin.buffer.read().decode() if path == STDIN else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--text {str(path)!r} cannot be read: {error}")
    if not text.strip():
        fail(f"--text {str(path)!r} is empty")
    return text.strip()
