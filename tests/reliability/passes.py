"""Forward passes and cache operations that fail, and what a cache does next."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch

from hf_sparse_attn import SparseCache, patch_model, unpatch_model
from hf_sparse_attn.cache.host.room import check_kv_storage
from hf_sparse_attn.methods import make_method
from tests.models import DEVICE, SPARSE, make_model, random_ids
from tests.reliability.injection import ERRORS, Line, failing_at, lines_of, sample

ROOM = 320
STORAGES = ("growing", "static", "host")
SETTINGS = {**SPARSE, "tokenselect": {"chunk_size": 32}}
PAD = 17
"""Left padding of the second row."""
AFTER = 3
"""Decode steps compared after a fault."""


class Situation(NamedTuple):
    """Calls that succeed, and the call that fails after them."""

    fed: tuple[int, ...]
    """Tokens of the former calls."""
    tokens: int
    """Tokens of the failing call."""


PASSES = {
    "prompt": Situation((), 150),
    "later prompt": Situation((150, 1), 40),
    "first step, which grows the buffers": Situation((150,), 1),
    "step": Situation((150, 1, 1), 1),
}


class HarmError(AssertionError):
    """A fault that did harm: another result, another length, an error that does not say what to do."""


def runs(method_name: str, storage: str) -> bool:
    """Return whether a method supports a storage."""
    if storage != "host":
        return True
    try:
        check_kv_storage("host", make_method(method_name))
    except ValueError:
        return False
    return True


class Bench:
    """A patched model, and caches of two rows that are fed the same tokens."""

    def __init__(self, method_name: str, storage: str) -> None:
        self.model = make_model("llama", dtype=torch.float64, num_hidden_layers=3)
        self.method = make_method(method_name, token_budget=48, **SETTINGS.get(method_name, {}))
        self.kv_storage = "host" if storage == "host" else "device"
        self.room = ROOM if storage == "static" else None
        self.ids = random_ids(4, ROOM)
        self.mask = torch.ones(4, ROOM, dtype=torch.long, device=DEVICE)
        self.mask[1, :PAD] = 0
        self.stock_logits = self.model(self.ids[:1, :9]).logits
        self.patch()

    def patch(self) -> None:
        patch_model(self.model, self.method, kv_storage=self.kv_storage)

    def new_cache(self) -> SparseCache:
        return SparseCache.for_model(self.model, self.room)

    def feed(self, cache: SparseCache, tokens: int, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Feed the tokens after those that are cached, and return their logits."""
        rows = torch.arange(2) if rows is None else rows
        begin = cache.get_seq_length()
        ids, mask = self.ids[rows, begin : begin + tokens], self.mask[rows, : begin + tokens]
        return self.model(ids, attention_mask=mask, past_key_values=cache).logits

    def filled(self, fed: tuple[int, ...]) -> SparseCache:
        cache = self.new_cache()
        for tokens in fed:
            self.feed(cache, tokens)
        return cache

    def check_stock(self) -> None:
        """Check that the model can be unpatched, and is then as it was."""
        unpatch_model(self.model)
        try:
            same(self.model(self.ids[:1, :9]).logits, self.stock_logits, "the unpatched model")
        finally:
            self.patch()


def same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raise :class:`HarmError` where logits differ."""
    try:
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    except AssertionError as error:
        raise HarmError(f"{what}: {str(error).splitlines()[-2]}") from error


def steps(bench: Bench, cache: SparseCache, rows: torch.Tensor | None = None) -> torch.Tensor:
    return torch.cat([bench.feed(cache, 1, rows) for _ in range(AFTER)], dim=1)


class Expected(NamedTuple):
    """The answers of a cache that never saw the fault."""

    call: torch.Tensor
    steps: torch.Tensor
    cropped: torch.Tensor | None
    instead: torch.Tensor | None
    """Steps without the failed call; None if the cache is empty before it."""


def expected_of(bench: Bench, situation: Situation, is_rebuilt: bool = False) -> Expected:
    """Return what a cache answers that never saw a fault, or one whose method finished its prompt anew before the call.

    The latter is what a static cache is left with if the method fails while it finishes a later prompt.
    """

    def before_the_call() -> SparseCache:
        cache = bench.filled(situation.fed)
        if is_rebuilt:
            for layer in cache.sparse_layers:
                layer.rebuild_metadata()
            cache.reopen_prompt()
        return cache

    cache = before_the_call()
    call, after = bench.feed(cache, situation.tokens), steps(bench, cache)
    cropped = _cropped(bench, cache)
    return Expected(call, after, cropped, steps(bench, before_the_call()) if situation.fed else None)


def _cropped(bench: Bench, cache: SparseCache) -> torch.Tensor | None:
    if bench.method.evicts:
        return None
    cache.crop(-2)
    return bench.feed(cache, 2)


def pass_lines(bench: Bench, situation: Situation, number: int, seed: int) -> list[Line]:
    cache = bench.filled(situation.fed)
    return sample(lines_of(lambda: bench.feed(cache, situation.tokens)), number, seed)


def fail_in_pass(
    bench: Bench, situation: Situation, expected: Expected, line: Line, error_name: str, repeats: bool
) -> str:
    """Let a pass fail, and compare what its cache answers next, when the call is repeated or other ones follow.

    Returns
    -------
    str
        ``"unchanged"``: the cache is as before the pass. ``"rebuilt"``: it is, but the method has finished its prompt
        anew. ``"complete"``: the pass ended before the error was raised, and the cache has its tokens.

    Raises
    ------
    HarmError
        The cache is none of these.
    """
    cache, error = bench.filled(situation.fed), ERRORS[error_name]()
    before = sum(situation.fed)
    with failing_at(line, error):
        try:
            bench.feed(cache, situation.tokens)
        except type(error):
            pass
        else:
            raise HarmError("the error was swallowed, or the line was not reached")
    outcome = {before: "unchanged", before + situation.tokens: "complete"}.get(cache.get_seq_length())
    if outcome is None:
        raise HarmError(f"the length is {cache.get_seq_length()}, and neither {before} nor {before + situation.tokens}")
    twin = copy.deepcopy(cache) if bench.room is not None and not bench.method.evicts else None
    try:
        _compare(bench, situation, expected, cache, outcome, repeats)
    except HarmError:
        if twin is None or outcome == "complete":
            raise
        outcome = "rebuilt"
        _compare(bench, situation, expected_of(bench, situation, is_rebuilt=True), twin, outcome, repeats)
    bench.check_stock()
    return outcome


def _compare(
    bench: Bench, situation: Situation, expected: Expected, cache: SparseCache, outcome: str, repeats: bool
) -> None:
    if outcome != "complete" and not repeats and expected.instead is not None:
        same(steps(bench, cache), expected.instead, "the steps in its place")
        return
    if outcome != "complete":
        same(bench.feed(cache, situation.tokens), expected.call, "the repeated call")
    same(steps(bench, cache), expected.steps, "the steps after it")
    if expected.cropped is not None:
        same(_cropped(bench, cache), expected.cropped, "a pass after a crop")
