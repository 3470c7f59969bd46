"""Memory of a GPU that really runs out, and Ctrl-C while a step is compiled or recorded: the next answer is whole."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from hf_sparse_attn import DecodeAhead, SparseCache, patch_model, unpatch_model
from hf_sparse_attn.patched import is_patched
from tests.models import SPARSE, make_model, random_ids

MIB = 1 << 20
METHODS = ["quest", "keycodes", "psa"]
GREEDY = {"do_sample": False, "eos_token_id": None}
WAYS = {
    "eager": lambda streamer: {"streamer": streamer, "disable_compile": True},
    "compiled": lambda streamer: {"streamer": streamer},
    "recorded": lambda streamer: {"custom_generate": DecodeAhead(streamer, cuda_graph=True)},
}
"""Arguments of ``generate()`` for each way to run its steps."""
ways = pytest.mark.parametrize(
    "way", ["eager", pytest.param("compiled", marks=pytest.mark.gpu), pytest.param("recorded", marks=pytest.mark.gpu)]
)


class AtToken(BaseStreamer):
    """Acts when a token reaches the host; the prompt is the first call of all."""

    def __init__(self, token: int, act: Callable[[], object]) -> None:
        self.left, self.act = token, act

    def put(self, value: torch.Tensor) -> None:
        if self.left == 0:
            self.act()
        self.left -= 1

    def end(self) -> None:
        pass


class Pair:
    """A patched model that is hurt, and one with the same weights that is not."""

    def __init__(self, method: str) -> None:
        self.hurt, self.whole = (make_model("llama", num_hidden_layers=3) for _ in range(2))
        self.stock_logits = self.whole(random_ids(1, 20)).logits
        for model in (self.hurt, self.whole):
            patch_model(model, method, token_budget=48, **SPARSE.get(method, {}))

    def check_answers(self, *inputs: torch.Tensor, **options: object) -> None:
        """Compare the next answers of both, and their logits once they are unpatched."""
        for ids in inputs:
            answers = [model.generate(ids, **GREEDY, **options) for model in (self.hurt, self.whole)]
            assert torch.equal(*answers)
        assert not is_patched(unpatch_model(self.hurt))
        torch.testing.assert_close(self.hurt(random_ids(1, 20)).logits, self.stock_logits, rtol=0, atol=0)


@contextmanager
def full_memory(mebibytes: int = 0) -> Iterator[None]:
    """Leave that much memory of the GPU, in pieces of a MiB, to tensors of at most a MiB, and none to larger ones.

    torch's allocator keeps the two sizes apart. First all gaps between existing tensors are filled.
    """
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total, ballast = torch.cuda.get_device_properties(0).total_memory, list[torch.Tensor]()

    def allow(extra: int) -> None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + extra) / total))

    def fill(size: int) -> None:
        while True:
            try:
                ballast.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                return

    try:
        allow(0)
        for power in range(26, 8, -1):  # 64 MiB to 512 bytes, the smallest piece that the allocator gives
            fill(1 << power)
        allow(2 * (mebibytes + 1) * MIB)
        spare = len(ballast)
        fill(MIB)
        assert len(ballast) >= spare + mebibytes
        del ballast[spare : spare + mebibytes]
        yield
    finally:
        ballast.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("mebibytes", [0, 1, 2])
@pytest.mark.parametrize("method", METHODS)
@torch.inference_mode()
def test_memory_runs_out_in_a_prompt(method: str, mebibytes: int) -> None:
    """More memory lets the prompt get further before it fails."""
    pair, ids = Pair(method), random_ids(6, 500)
    options = {"max_new_tokens": 6, "disable_compile": True}
    pair.hurt.generate(ids, **GREEDY, **options)  # libraries take their workspaces
    with full_memory(mebibytes), pytest.raises(torch.OutOfMemoryError):
        pair.hurt.generate(ids, **GREEDY, **options)
    pair.check_answers(ids, ids[:2], **options)


@pytest.mark.gpu
@pytest.mark.parametrize("max_cache_len", [None, 512], ids=["growing", "static"])
@pytest.mark.parametrize("method", METHODS)
@torch.inference_mode()
def test_a_cache_goes_on_after_a_pass_that_ran_out_of_memory(method: str, max_cache_len: int | None) -> None:
    pair, ids = Pair(method), random_ids(4, 400)
    hurt, whole = (SparseCache.for_model(model, max_cache_len) for model in (pair.hurt, pair.whole))
    at = 0
    for tokens in (250, 1, 100, 1, 1):  # a prompt, a later one, and steps
        new = ids[:, at : at + tokens]
        with full_memory(), pytest.raises(torch.OutOfMemoryError):
            pair.hurt(new, past_key_values=hurt)
        assert hurt.get_seq_length() == at
        logits = [model(new, past_key_values=cache).logits for model, cache in ((pair.hurt, hurt), (pair.whole, whole))]
        torch.testing.assert_close(*logits, rtol=0, atol=0)
        at += tokens
    pair.check_answers(ids[:, :100], max_new_tokens=6, disable_compile=True)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@torch.inference_mode()
def test_memory_runs_out_in_a_step_of_generate(way: str) -> None:
    pair, ids = Pair("quest"), random_ids(2, 120)
    pair.hurt.generate(ids, **GREEDY, max_new_tokens=20, **WAYS[way](None))
    with ExitStack() as held:
        streamer = AtToken(8, lambda: held.enter_context(full_memory()))
        with pytest.raises(torch.OutOfMemoryError):
            pair.hurt.generate(ids, **GREEDY, max_new_tokens=200, **WAYS[way](streamer))
        assert streamer.left < 0
    pair.check_answers(ids, max_new_tokens=20, **WAYS[way](None))


@contextmanager
def ctrl_c() -> Iterator[Callable[[float], None]]:
    """Return a function that has another thread send SIGINT to this process after some seconds.

    Callbacks of the garbage collector are set aside: Python drops what one of them raises, and after a long collection
    the first of them (hypothesis has one) is where the signal is seen.
    """
    former, timers = signal.signal(signal.SIGINT, signal.default_int_handler), list[threading.Timer]()
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()

    def press(seconds: float) -> None:
        timers.append(threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)))
        timers[-1].start()

    try:
        yield press
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()
        signal.signal(signal.SIGINT, former)
        gc.callbacks[:] = callbacks


def interrupted(pair: Pair, ids: torch.Tensor, way: str, token: int, seconds: float) -> None:
    """Generate, with Ctrl-C some seconds after a token; the text is long enough for the signal to come before its end.

    Raises
    ------
    KeyboardInterrupt
        As it should.
    AssertionError
        The answer ended before.
    """
    with ctrl_c() as press:
        streamer = AtToken(token, lambda: press(seconds))
        pair.hurt.generate(ids, **GREEDY, max_new_tokens=380, **WAYS[way](streamer))
    raise AssertionError("the answer ended before Ctrl-C")


@ways
@pytest.mark.parametrize("method", ["quest", "keycodes"])
def test_ctrl_c_while_an_answer_is_written(method: str, way: str) -> None:
    """At several moments of a step, and in the recorded way while its graphs are recorded, as each call does anew."""
    pair, ids = Pair(method), random_ids(2, 120)
    pair.hurt.generate(ids, **GREEDY, max_new_tokens=12, **WAYS[way](None))  # compiles
    for token, seconds in ((1, 0.0), (1, 0.004), (2, 0.001), (3, 0.0), (6, 0.002), (9, 0.015)):
        with pytest.raises(KeyboardInterrupt):
            interrupted(pair, ids, way, token, seconds)
    pair.check_answers(ids, ids[:1, 30:], max_new_tokens=12, **WAYS[way](None))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("way", "seconds"), [("compiled", 0.05), ("compiled", 1.0), ("recorded", 0.0), ("recorded", 0.03)]
)
def test_ctrl_c_in_the_first_call(way: str, seconds: float) -> None:
    """While the step is traced and compiled, or once the first graph is recorded."""
    torch._dynamo.reset()
    pair, ids = Pair("quest"), random_ids(2, 120)
    with pytest.raises(KeyboardInterrupt):
        interrupted(pair, ids, way, 1, seconds)
    pair.check_answers(ids, max_new_tokens=12, **WAYS[way](None))
