"""Torch references of the ops that copy blocks from host memory."""

import torch

from .._reference import count_tokens, row_lengths


def load_blocks(
    keys: torch.Tensor,
    values: torch.Tensor,
    host_keys: torch.Tensor,
    host_values: torch.Tensor,
    block_indices: torch.Tensor,
    first_tokens: torch.Tensor,
) -> None:
    """Reference of `hf_sparse_attn_kernels.load_blocks`."""
    num_blocks, block_size = keys.shape[:2]
    first_tokens = first_tokens.cpu()
    _check_range("block_indices", block_indices.cpu(), num_blocks - 1, "num_blocks - 1")
    _check_range("first_tokens", first_tokens, len(host_keys) - block_size, "num_tokens - block_size")
    tokens = (first_tokens[:, None] + torch.arange(block_size, device="cpu")).flatten()
    for target, source in ((keys, host_keys), (values, host_values)):
        target[block_indices] = source[tokens].view(-1, *target.shape[1:]).to(target.device)


def _check_range(name: str, indices: torch.Tensor, maximum: int, maximum_name: str) -> None:
    """Check that all indices are from 0 to `maximum`."""
    wrong = indices[(indices < 0) | (indices > maximum)]
    if len(wrong):
        raise ValueError(f"{name} contains {wrong[0].item()}; allowed: 0 to {maximum_name} = {maximum}")


def keep_chosen(
    keys: torch.Tensor,
    values: torch.Tensor,
    kept_keys: torch.Tensor,
    kept_values: torch.Tensor,
    slot_blocks: torch.Tensor,
    block_slots: torch.Tensor,
    block_indices: torch.Tensor,
    block_counts: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    block_size: int,
    counter: torch.Tensor | None,
    traffic: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.keep_chosen`."""
    slots, kv_heads = slot_blocks.shape[2] - 1, keys.shape[1]
    chosen = block_indices.expand(-1, kv_heads, -1).long()  # [batch, kv_heads, n]
    entries = torch.arange(chosen.shape[2], device=keys.device)
    is_chosen = entries < block_counts.expand(-1, kv_heads)[..., None]
    length = row_lengths(seq_start, seq_end)
    in_newest = length % block_size  # tokens of the block that is not full
    newest = torch.where(in_newest > 0, length // block_size, -1)[:, None, None]
    is_newest = is_chosen & (chosen == newest)
    is_full = is_chosen & ~is_newest

    held = slot_blocks[..., :slots]
    slot = block_slots.gather(2, chosen.clamp(0, block_slots.shape[2] - 1)).long()
    is_hit = is_full & (slot >= 0) & (slot < slots)
    is_hit &= held.gather(2, slot.clamp(0, slots - 1)) == chosen
    is_missing = is_full & ~is_hit
    is_used = torch.zeros_like(slot_blocks, dtype=torch.bool)
    is_used.scatter_(2, torch.where(is_hit, slot, slots), True)
    free = is_used[..., :slots].byte().argsort(dim=2, stable=True)  # the free slots in their order, then the others
    rank = (is_missing.cumsum(2) - 1).clamp_min(0)
    slot = torch.where(is_hit, slot, torch.where(is_missing, free.gather(2, rank), slots))

    row, head, entry = is_missing.nonzero(as_tuple=True)
    block, target = chosen[row, head, entry], slot[row, head, entry]
    slot_blocks[row, head, target] = block.int()
    block_slots[row, head, block] = target.to(block_slots.dtype)
    within = torch.arange(block_size, device=keys.device)
    pairs = (row[:, None], head[:, None])
    first = seq_start[row].long() + block * block_size
    for kept, tokens in ((kept_keys, keys), (kept_values, values)):
        kept[(*pairs, target[:, None] * block_size + within)] = tokens[(*pairs, first[:, None] + within)]

    has_newest = is_newest.any(2)
    begin = (length - in_newest)[:, None]
    filled = slot_blocks[..., slots]
    is_there = (filled > begin) & (filled <= length[:, None])
    lacking = torch.where(is_there, filled, begin)  # the first token that the last slot lacks
    position = begin + within  # [batch, block_size]
    is_loaded = (
        (position[:, None] >= lacking[..., None]) & (position < length[:, None])[:, None] & has_newest[..., None]
    )
    row, head, offset = is_loaded.nonzero(as_tuple=True)
    source = (seq_start[row] + position[row, offset]).long()
    for kept, tokens in ((kept_keys, keys), (kept_values, values)):
        kept[row, head, slots * block_size + offset] = tokens[row, head, source]
    slot_blocks[..., slots] = torch.where(has_newest, length[:, None], filled)

    if counter is not None:
        tokens_read = is_full.sum() * block_size + (has_newest * in_newest[:, None]).sum()
        count_tokens(counter, tokens_read, length, kv_heads)
    if traffic is not None:
        loaded = is_missing.sum() * block_size + is_loaded.sum()
        traffic += torch.stack((is_full.sum(), is_hit.sum(), loaded, loaded.new_tensor(is_full[..., 0].numel())))
    return slot.masked_fill(~is_chosen, -1).int(), (slots * block_size + in_newest).int()
