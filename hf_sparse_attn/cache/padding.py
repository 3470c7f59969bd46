"""Attention masks: left padding, and the masks that a cache does not support."""

from __future__ import annotations

from typing import NamedTuple

import torch

LEFT_PADDING = "only left padding is supported: set tokenizer.padding_side = 'left'"


class Padding(NamedTuple):
    """Left padding of the rows of a batch."""

    seq_start: torch.Tensor
    """[batch], an integer type: position of each row's first token."""
    least: int
    """Padding of the row with the least."""
    has_padding: bool
    """Whether any row has padding."""


def chunk_ends(tokens: int, chunk: int, padding: int) -> list[int]:
    """Divide the tokens of a pass behind its first ``padding`` into chunks; return where each ends."""
    return [*range(padding + chunk, tokens, chunk), tokens]


def shared_padding(least: int, cached: int, tokens: int) -> int:
    """Return how many of a pass's tokens are padding in all rows; 0 if all of them are.

    Chunks begin behind it, so that what each holds does not depend on it.
    """
    own = max(0, least - cached)
    return own if own < tokens else 0


def token_mask(attention_mask: torch.Tensor, cached: int, num_new: int, may_look_ahead: bool = False) -> torch.Tensor:
    """Convert a model's attention mask to bool [batch, cached + new tokens], True for tokens.

    Parameters
    ----------
    attention_mask
        [batch, cached + new tokens], 0 for padding; or the causal mask that ``generate()`` derives from it for a static
        cache, bool [batch, 1, new tokens, cached + new tokens].
    cached, num_new
        Tokens per row, padding included.
    may_look_ahead
        Whether a 4-D mask may let tokens attend to later ones too, such as those of the same image.

    Raises
    ------
    ValueError
        The mask has another shape, or is not causal over the keys of its last query.
    """
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4 and attention_mask.dtype == torch.bool:
        attention_mask = _last_query_row(attention_mask, may_look_ahead)
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
        shape = tuple(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else attention_mask
        raise ValueError(f"attention_mask must be 2-D, [batch, tokens], for a patched model; got {shape}")
    if attention_mask.shape[1] != cached + num_new:
        raise ValueError(
            f"attention_mask must cover the {cached} cached and {num_new} new tokens, got {attention_mask.shape[1]}"
        )
    return attention_mask != 0


QUERIES_AT_ONCE = 1024
"""Queries of a 4-D mask that are compared at once: another mask of all would take as much memory as the mask."""


def _last_query_row(attention_mask: torch.Tensor, may_look_ahead: bool) -> torch.Tensor:
    """Return the keys of the last query, if the mask is the one that follows from them."""
    mask = attention_mask[:, 0]  # [batch, query, key]
    is_token, queries = mask[:, -1], mask.shape[1]
    is_wrong = torch.zeros((), dtype=torch.bool, device=mask.device)
    for first in range(0, queries, QUERIES_AT_ONCE):
        part = mask[:, first : first + QUERIES_AT_ONCE]
        end = mask.shape[2] - queries + first + part.shape[1]
        needed = causal_mask(is_token, part.shape[1], end)[:, 0]
        sees_hidden = (part & ~is_token[:, None]).any(dim=2)
        differs = ((needed & ~part).any(dim=2) | sees_hidden) if may_look_ahead else (part != needed).any(dim=2)
        # A hidden query's result is not used, but a query that sees its own hidden key is no padding. torch before 2.5
        # wants no query without keys, so Transformers may let one that has none see all.
        of_hidden = sees_hidden & ~part.all(dim=2)
        is_wrong |= torch.where(is_token[:, end - part.shape[1] : end], differs, of_hidden).any()
    if not bool(is_wrong):
        return is_token
    raise ValueError(
        f"attention_mask must be 2-D, [batch, tokens], or causal for a patched model; got a mask of shape "
        f"{tuple(attention_mask.shape)} that is not causal over left-padded tokens. Tokens may attend to later ones, "
        "as those of an image do in some models, in the first pass over a cache, with a method whose prefill is dense"
    )


def rows_with_holes(is_token: torch.Tensor) -> list[int]:
    """Return the indices of rows of a token mask, [batch, tokens], with padding after a token. Waits for the device."""
    holes = (is_token[:, :-1] & ~is_token[:, 1:]).any(dim=1)
    return [int(row) for row in holes.nonzero().flatten()] if bool(holes.any()) else []


def can_be_left_out(is_token: torch.Tensor, num_new: int) -> bool:
    """Whether a token mask, [batch, tokens], hides only new tokens, the same in every row, and not the last one.

    ``generate()`` makes such a mask itself if it gets none and the prompt's text contains the padding token.
    """
    same = (is_token == is_token[:1]).all() & is_token[:, -1].all() & is_token[:, : is_token.shape[1] - num_new].all()
    return bool(same)


def left_padding(is_token: torch.Tensor) -> Padding:
    """Return the left padding of a token mask without holes, [batch, tokens]. Waits for the device."""
    seq_start = is_token.shape[1] - is_token.sum(dim=1)
    least, most = (int(bound) for bound in seq_start.aminmax())
    return Padding(seq_start, least, most > 0)


def causal_mask(attention_mask: torch.Tensor, queries: int, end: int | None = None) -> torch.Tensor:
    """Return dense attention's mask, bool [batch, 1, queries, keys], for a mask [batch, keys], 0 for padding.

    The queries are those before the position ``end``, or the last ones.
    """
    at = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    end = len(at) if end is None else end
    return (at <= at[end - queries : end, None]) & (attention_mask != 0)[:, None, None]


def disagrees(is_token: torch.Tensor, seq_start: torch.Tensor) -> torch.Tensor:
    """Return, as a bool scalar, whether a token mask, [batch, tokens], differs from left padding to ``seq_start``."""
    positions = torch.arange(is_token.shape[1], device=is_token.device)
    return (is_token != (positions >= seq_start[:, None])).any()
