"""Models that Transformers has divided by tensor parallelism: which heads this process has, and whether ranks agree."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import transformers

from hf_sparse_attn._version import __version__
from hf_sparse_attn.head_shard import WHOLE, HeadShard
from hf_sparse_attn.heads import kv_heads_of
from hf_sparse_attn.patched import text_model

KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")
AGREEMENT_TIMEOUT = timedelta(seconds=60)
"""How long a rank waits for the others in ``patch_model``."""
_calls: Counter[str] = Counter()
"""Agreements so far, by the ranks that took part."""


def ranks_of(model: Any) -> HeadShard:
    """Return this process's place among those that share a model by tensor parallelism."""
    mesh = getattr(model, "_device_mesh", None)  # Transformers 5.16 sets no tp_size
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if mesh is None or (names and "tp" not in names):  # none, or another kind of parallelism
        return WHOLE
    mesh = mesh["tp"] if mesh.ndim > 1 else mesh
    return WHOLE if mesh.size() == 1 else HeadShard(mesh.get_local_rank(), mesh.size(), mesh.get_group())


def head_shard_of(model: Any) -> HeadShard:
    """Return the part of the KV heads that this process has; all without tensor parallelism, and if they are gathered.

    Raises
    ------
    ValueError
        The number of ranks does not divide the KV heads.
    """
    ranks = ranks_of(model)
    if ranks.is_whole or not _divides_heads(model):
        return WHOLE
    heads = kv_heads_of(text_model(model).config)
    if heads % ranks.size:
        raise ValueError(
            f"tensor parallelism over {ranks.size} processes does not divide the model's {heads} KV heads; "
            f"allowed: {', '.join(str(size) for size in range(1, heads + 1) if heads % size == 0)}"
        )
    return ranks


def _divides_heads(model: Any) -> bool:
    """Whether the model's plan divides the heads; some plans gather the projections, and every rank has all heads."""
    plan: dict[str, str] = model.tp_plan or {}
    return any(name.rsplit(".", 1)[-1] in KEY_PROJECTIONS and style == "colwise" for name, style in plan.items())


@contextmanager
def agreement(ranks: HeadShard) -> Iterator[dict[str, str]]:
    """Compare what the ranks put into the dict, and raise on every rank if they differ or one of them fails.

    The ranks leave texts in the store by which their processes found each other, rather than in a collective: one that
    is missing is then an error after :data:`AGREEMENT_TIMEOUT`, on any backend.

    Raises
    ------
    ValueError
        Ranks have put in something else, or raised.
    RuntimeError
        A rank did not come.
    """
    if ranks.is_whole:
        yield {}
        return
    settings = {
        "hf_sparse_attn": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    board = _Board(ranks)
    try:
        yield settings
    except BaseException as error:
        board.post({"error": f"{type(error).__name__}: {error}"})
        raise
    board.post(settings)
    _compare(board.read("call patch_model for its part of the model", AGREEMENT_TIMEOUT))


def texts_of_all(ranks: HeadShard, own: dict[str, str], timeout: timedelta) -> list[dict[str, str]]:
    """Return what each rank hands over, in the order of the ranks.

    Raises
    ------
    RuntimeError
        A rank did not come in time.
    """
    board = _Board(ranks)
    board.post(own)
    return board.read("make the same calls in the same order", timeout)


class _Board:
    """The texts of one agreement, by rank."""

    def __init__(self, ranks: HeadShard) -> None:
        distributed = torch.distributed
        assert ranks.group is not None
        self.store = distributed.distributed_c10d._get_default_store()
        self.rank, self.size = ranks.rank, ranks.size
        self.ranks = "-".join(map(str, distributed.get_process_group_ranks(ranks.group)))
        self.call = _calls[self.ranks]
        _calls[self.ranks] += 1

    def _key(self, rank: int) -> str:
        return f"hf_sparse_attn/{self.ranks}/{self.call}/{rank}"

    def post(self, text: dict[str, str]) -> None:
        self.store.set(self._key(self.rank), json.dumps(text))

    def read(self, duty: str, timeout: timedelta) -> list[dict[str, str]]:
        """Return all ranks' texts, in the order of the ranks; an error names what a rank that is missing had to do."""
        texts = []
        for rank in range(self.size):
            key = self._key(rank)
            try:
                self.store.wait([key], timeout)
            except Exception as error:  # the type depends on the version of torch
                raise RuntimeError(
                    f"rank {rank} of {self.size} did not come within {timeout.total_seconds():.0f} s: "
                    f"every rank must {duty}"
                ) from error
            texts.append(json.loads(self.store.get(key)))
        return texts


def _compare(texts: list[dict[str, str]]) -> None:
    for rank, text in enumerate(texts):
        if "error" in text:
            raise ValueError(f"rank {rank} could not patch its part of the model: {text['error']}")
    for name, first in texts[0].items():
        for rank, text in enumerate(texts):
            if text[name] != first:
                raise ValueError(
                    f"ranks must be patched alike, but {name} is {first} on rank 0 and {text[name]} on rank {rank}"
                )
