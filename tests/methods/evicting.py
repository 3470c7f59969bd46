"""A layer that evicts, computed token by token in plain loops, for any rule of what to keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hf_sparse_attn import SparseMethod
from hf_sparse_attn.cache.evicting import EvictingStorage
from hf_sparse_attn.cache.layer import SparseLayer
from hf_sparse_attn.cache.padding import Padding
from tests.layers import step

KV_HEADS, GROUP, HEAD_DIM = 2, 3, 10
SCALE = 0.4
STEPS = 25


@dataclass
class PlainRow:
    """One row: the tokens that each KV head keeps, and the weights that they have got."""

    queries: torch.Tensor
    """[kv_heads, group, tokens, head_dim] of all tokens that will be fed."""
    keys: torch.Tensor
    """[kv_heads, tokens, head_dim]."""
    values: torch.Tensor
    """[kv_heads, tokens, head_dim]."""
    fed: int = 0
    kept: list[list[int]] = field(default_factory=lambda: [[] for _ in range(KV_HEADS)])
    weights: list[list[dict[int, float]]] = field(default_factory=lambda: [[] for _ in range(KV_HEADS)])
    """By KV head and token fed: the weight that the token's queries of a group gave to each token, in sum."""

    def feed(self) -> torch.Tensor:
        """Feed the next token; return the attention's output, [kv_heads * group, head_dim]."""
        token, self.fed = self.fed, self.fed + 1
        outputs = []
        for head in range(KV_HEADS):
            self.kept[head].append(token)
            scores = torch.stack([self.queries[head, :, token] @ self.keys[head, other] for other in self.kept[head]])
            weights = (scores * SCALE).softmax(0)  # [kept, group]
            self.weights[head].append(dict(zip(self.kept[head], weights.sum(1).tolist(), strict=True)))
            outputs.append(
                sum(weights[i, :, None] * self.values[head, other] for i, other in enumerate(self.kept[head]))
            )
        return torch.cat(outputs)


def largest(scores: dict[int, float], number: int) -> list[int]:
    """The tokens of the largest scores, of equal ones the earliest, in order."""
    return sorted(sorted(scores, key=lambda token: (-scores[token], token))[:number])


@dataclass
class Run:
    """The results of a layer and of the plain loops for the same tokens."""

    method: SparseMethod
    rule: Callable[[PlainRow], None]
    """Called with a row after each prompt and step, to evict from ``row.kept``."""
    prompts: tuple[int, ...] = (37, 26)
    padding: int = 17
    dtype: torch.dtype = torch.float64
    layer: SparseLayer = field(init=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(7)
        self.total = sum(self.prompts) + STEPS
        shape = (2, KV_HEADS, self.total, HEAD_DIM)
        self.keys, self.values = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        self.queries = torch.randn(2, KV_HEADS * GROUP, *shape[2:], generator=generator, dtype=torch.float64)
        self.keys[1, :, : self.padding] = self.values[1, :, : self.padding] = torch.nan
        self.layer = SparseLayer(self.method, EvictingStorage(), q_heads=KV_HEADS * GROUP)
        self.layer._shared.padding = Padding(torch.tensor([0, self.padding]), 0, self.padding > 0)
        self.fed = 0

    def feed(self, tokens: int) -> torch.Tensor:
        """Feed a part of a prompt to the layer; return the output, [batch, q_heads, tokens, head_dim]."""
        if self.fed:
            self.write_padding(0.0)  # which dense passes read under a mask
        new = slice(self.fed, self.fed + tokens)
        self.fed += tokens
        self.layer.update(self.keys[:, :, new].nan_to_num(), self.values[:, :, new].nan_to_num())
        query = self.queries[:, :, new]
        self.layer.observe(query, SCALE)
        mask = None
        if self.layer.storage.kept is None:
            at = torch.arange(self.fed)
            mask = ((at <= at[new, None]) & (at >= self.layer.seq_start[:, None, None]))[:, None]
        return self.layer.method.prefill(query, self.layer, SCALE, mask)

    def finish(self) -> None:
        """Finish the prompt, and make padding unreadable for the steps after an eviction."""
        self.layer.method.finish_prompt([self.layer])
        if self.layer.storage.kept is not None:
            self.write_padding(torch.nan)

    def write_padding(self, content: float) -> None:
        first = self.layer.rows.seq_start[1]
        self.layer.keys[1, :, :first] = self.layer.values[1, :, :first] = content

    def step(self) -> torch.Tensor:
        """Decode the next token; return [batch, q_heads, head_dim]."""
        at, self.fed = self.fed, self.fed + 1
        return step(self.layer, *(states[:, :, at] for states in (self.queries, self.keys, self.values)), SCALE)

    def check(self) -> None:
        """Compare outputs and kept tokens, over prompts with steps in between."""
        rows = []
        for row, start in enumerate((0, self.padding)):
            queries = self.queries[row].unflatten(0, (KV_HEADS, GROUP))[:, :, start:]
            rows.append(PlainRow(queries, self.keys[row, :, start:], self.values[row, :, start:]))
        steps = [STEPS // len(self.prompts)] * len(self.prompts)
        for tokens, number in zip(self.prompts, steps, strict=True):
            self.check_prompt(rows, tokens)
            for _ in range(number):
                output = self.step()
                for row, plain in enumerate(rows):
                    torch.testing.assert_close(output[row], plain.feed())
                    self.rule(plain)
                self.compare_kept(rows)

    def check_prompt(self, rows: list[PlainRow], tokens: int) -> None:
        """Feed a prompt in two parts, and finish it."""
        for part in (tokens // 2, tokens - tokens // 2):
            output = self.feed(part)
            for row, plain in enumerate(rows):
                own = self.fed - (0 if row == 0 else self.padding)
                for at in range(max(0, part - own), part):
                    torch.testing.assert_close(output[row, :, at], plain.feed())
        self.finish()
        for plain in rows:
            self.rule(plain)
        self.compare_kept(rows)

    def compare_kept(self, rows: list[PlainRow]) -> None:
        """Compare the tokens kept, and what the stats would count."""
        kept = self.layer.storage.kept
        for row, plain in enumerate(rows):
            for head in range(KV_HEADS):
                assert held(self.layer, row, head) == sorted(plain.kept[head])
        assert kept is None or kept.length == self.fed


def held(layer: SparseLayer, row: int, head: int) -> list[int]:
    """The places in its row of the tokens that a KV head holds, ascending."""
    storage = layer.storage
    positions = storage.positions(layer.lengths).expand(2, KV_HEADS, -1)[row, head].tolist()
    first = int(layer.rows.seq_start[row])
    open_slot = (
        None if storage.kept is None or storage.kept.open_slot is None else int(storage.kept.open_slot[row, head])
    )
    places = [
        at - int(layer.seq_start[row]) for slot, at in enumerate(positions) if slot >= first and slot != open_slot
    ]
    return sorted(places)
