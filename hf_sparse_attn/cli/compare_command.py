"""The ``hf-sparse-attn compare`` command: check the options, run the comparison, write its output."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from hf_sparse_attn.cli import options
from hf_sparse_attn.cli.compare import PasskeyWork, PromptWork, Side, Work, run_side
from hf_sparse_attn.cli.estimate import expected_seconds
from hf_sparse_attn.cli.loading import load, shown_name
from hf_sparse_attn.cli.outputs import Outputs
from hf_sparse_attn.cli.progress import WORTH_SAYING_SECONDS, about, say, stages
from hf_sparse_attn.cli.report import Comparison, comparison_table
from hf_sparse_attn.cli.terminal import fail, integers, parse_settings, print_table, user_errors, words
from hf_sparse_attn.cli.variants import column_names, make_methods

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_sparse_attn.methods import SparseMethod


def compare(
    model_name: options.Model,
    method_names: options.Methods = None,
    token_budget: options.TokenBudgets = None,
    settings: options.Settings = None,
    passkey_tokens: options.PasskeyTokens = None,
    depths: options.Depths = options.DEFAULT_DEPTHS,
    seed: options.Seed = 0,
    prompt_file: options.PromptFile = None,
    raw: options.Raw = False,
    max_new_tokens: options.MaxNewTokens = None,
    revision: options.Revision = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    as_json: options.AsJson = False,
    html: options.Html = None,
    picture: options.Picture = None,
) -> None:
    """Answer the same prompts with dense attention and with each method, and compare them.

    Shows the answers, the share of the KV cache read, speed and memory.

    Prompts are haystacks that hide a passkey, or the text of a file.
    Progress goes to stderr.
    """
    if prompt_file is not None and passkey_tokens is not None:
        fail("--prompt-file and --passkey-tokens cannot be used together")
    if prompt_file is not None and (depths != options.DEFAULT_DEPTHS or seed):
        fail("--depths and --seed are for passkeys, not for --prompt-file")
    if raw and prompt_file is None:
        fail("--raw needs --prompt-file: passkeys are not put into the chat template")
    needle_depths = _parse_depths(depths)
    text = _read_prompt(prompt_file) if prompt_file is not None else None
    budgets = integers("--token-budget", ",".join(token_budget) if token_budget else None)
    parameters = parse_settings("--set", settings or [])
    if dtype is not None and dtype not in options.DTYPES:
        fail(f"--dtype {dtype!r} is unknown; allowed: {', '.join(options.DTYPES)}")
    with _user_errors():
        methods = make_methods(words("--method", ",".join(method_names or ["quest"])), budgets, parameters)
    outputs = Outputs.checked(html, picture, bool(methods))

    with _user_errors():
        model, tokenizer = load(model_name, dtype, device, revision)
    _check_patchable(model, methods)
    work: Work
    if text is not None:
        work = PromptWork(tokenizer, _encode_prompt(tokenizer, text, raw), max_new_tokens or options.PROMPT_NEW_TOKENS)
    else:
        length = options.DEFAULT_PASSKEY_TOKENS if passkey_tokens is None else passkey_tokens
        work = _passkeys(tokenizer, length, needle_depths, seed, max_new_tokens or options.PASSKEY_NEW_TOKENS)
    with _user_errors():
        _check_positions(model, methods, max(map(len, work.prompts)) + work.new_tokens)

    with user_errors(ImportError):  # psutil is optional
        sides = _measure(model, methods, work)
    comparison = Comparison.of(shown_name(model_name, revision), model, methods, sides, work.facts)
    if as_json:
        sys.stdout.write(json.dumps({**work.settings, **comparison.as_json()}, indent=2) + "\n")
    else:
        print_table(comparison_table(comparison))
    outputs.write(model, comparison, work)


def _measure(model: PreTrainedModel, methods: Sequence[SparseMethod], work: Work) -> list[Side]:
    """Announce how long the work takes, then run dense attention and each method."""
    count, longest = len(work.prompts), max(work.prompts, key=len)
    seconds = expected_seconds(model, longest, work.decode_steps) * count * (1 + len(methods))
    if seconds >= WORTH_SAYING_SECONDS:
        sides = f"{1 + len(methods)} x " if methods else ""
        say(f"{about(seconds)} for {sides}{count} {work.unit}{'s' if count > 1 else ''} of {len(longest):,} tokens")
    with stages() as progress:
        names = ["dense", *column_names(methods)]
        return [
            run_side(model, method, name, work, progress) for name, method in zip(names, [None, *methods], strict=True)
        ]


def _parse_depths(text: str) -> list[float]:
    try:
        depths = [float(part) for part in text.split(",")]
    except ValueError:
        depths = []
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        fail(f"--depths {text!r} is not a comma-separated list of numbers from 0 to 1")
    return depths


def _read_prompt(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--prompt-file {str(path)!r} cannot be read: {error}")
    if not text.strip():
        fail(f"--prompt-file {str(path)!r} is empty")
    return text


def _passkeys(
    tokenizer: PreTrainedTokenizerBase, length: int, depths: Sequence[float], seed: int, new_tokens: int
) -> PasskeyWork:
    from hf_sparse_attn.cli.passkey import make_passkey

    with _user_errors():
        passkeys = [make_passkey(tokenizer, length, depth, seed + index) for index, depth in enumerate(depths)]
    return PasskeyWork(tokenizer, passkeys, depths, new_tokens)


def _encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, raw: bool) -> list[int]:
    if tokenizer.chat_template and not raw:
        messages = [{"role": "user", "content": text}]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # the template adds them itself
    return list(tokenizer(text)["input_ids"])


def _check_patchable(model: PreTrainedModel, methods: Sequence[SparseMethod]) -> None:
    """Fail before any work if the model cannot be patched."""
    from hf_sparse_attn import sparse_attention

    for method in methods:
        with _user_errors(), sparse_attention(model, method):
            pass


def _check_positions(model: PreTrainedModel, methods: Sequence[SparseMethod], needed: int) -> None:
    from hf_sparse_attn.rope import max_positions

    limits = {method.name: method.prompt_limit(model.config) for method in methods}
    known = {name: limit for name, limit in limits.items() if limit is not None}
    if not methods:
        known = {"full": max_positions(model.config)}
    available = min(known.values(), default=needed)
    if needed > available:
        names = ", ".join(name for name, limit in known.items() if limit == available)
        fail(f"prompt and answer take {needed} tokens; with {names} the model has positions for {available}")


def _user_errors() -> AbstractContextManager[None]:
    """Report the package's errors on bad input in one line."""
    return user_errors(ValueError, TypeError, NotImplementedError, OSError)
