"""Torch reference of `load_blocks`."""

import torch


def load_blocks(
    keys: torch.Tensor,
    values: torch.Tensor,
    host_keys: torch.Tensor,
    host_values: torch.Tensor,
    block_indices: torch.Tensor,
    first_tokens: torch.Tensor,
) -> None:
    """Reference of `hf_sparse_attn_kernels.load_blocks`."""
    tokens = (first_tokens.cpu()[:, None] + torch.arange(keys.shape[1])).flatten()
    for target, source in ((keys, host_keys), (values, host_values)):
        target[block_indices] = source[tokens].view(-1, *target.shape[1:]).to(target.device)
