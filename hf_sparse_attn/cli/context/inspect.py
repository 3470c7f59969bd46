"""The ``hf-sparse-attn context inspect`` command: what a file holds, without a model."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from hf_sparse_attn.cli import options as common
from hf_sparse_attn.cli.context import options
from hf_sparse_attn.cli.context.report import Facts, budget_as_json, budget_rows, facts_table, layers_table
from hf_sparse_attn.cli.progress import waiting
from hf_sparse_attn.cli.terminal import fail, print_table, user_errors
from hf_sparse_attn.context.contents import FileContents, read_budget, read_contents

DIGITS = 12
"""Digits of a hash in the table."""


def inspect(file: options.File, as_json: common.AsJson = False) -> None:
    """Show what a file holds, and how much of the context each layer and KV head reads.

    Needs no model. The shares are computed from the queries and centroids in the file.
    """
    if not file.is_file():
        fail(f"FILE {str(file)!r} cannot be read: no such file")
    with user_errors(ValueError, OSError):
        contents = read_contents(file)
        with waiting(f"reading {file}"):
            budget = read_budget(file)
    method = contents.header.method
    if as_json:
        found = {**_facts(file, contents).as_json(), "method": asdict(contents.header.method)}
        sys.stdout.write(json.dumps({**found, "budget": budget_as_json(budget)}, indent=2) + "\n")
        return
    facts = _facts(file, contents, DIGITS)
    print_table(facts_table(str(file), facts, budget_rows(budget), method))
    print_table(layers_table(budget))


def _facts(file: Path, contents: FileContents, digits: int | None = None) -> Facts:
    header = contents.header
    origin = {
        "model": header.identity.model_id,
        "dtype": contents.dtype,
        "config_hash": header.identity.config_hash[:digits],
        "weights_hash": header.identity.weights_hash[:digits],
        "token_ids_hash": header.token_ids_hash[:digits],
        "library_version": header.version,
    }
    return Facts(
        tokens=header.num_tokens,
        layers=header.num_layers,
        kv_heads=contents.kv_heads,
        file=str(file),
        file_bytes=file.stat().st_size,
        counts=contents.clusters,
        thresholds=contents.thresholds,
        origin=origin,
        bytes=contents.num_bytes,
        seconds=header.seconds._asdict(),
    )
