"""Dense attention of a chunk of the prefill, from other libraries: causal over all tokens before it and itself."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from op_bench.dense import Backend
from op_bench.shapes import Shape
from op_bench.token_oracle import ChunkLayer, check_dense_chunk


def backends(shape: Shape) -> list[Backend]:
    """Return all backends that may run; running them shows which ones do.

    torch aligns cuDNN's causal mask with the first key, not the last. cuDNN therefore takes the chunk in two parts,
    which are merged. It also runs without a mask as a bound, with at most the chunk's share of extra work.
    """
    to_the_end = partial(check_dense_chunk, is_causal=False)
    found = [
        Backend("SDPA cuDNN, in two parts", _cudnn_in_parts, check_dense_chunk),
        Backend("SDPA cuDNN, without a mask", _cudnn_unmasked, to_the_end),
        Backend("SDPA flash", _flash, check_dense_chunk),
    ]
    if find_spec("flashinfer") is not None and shape.batch == 1:
        found.append(Backend("FlashInfer", _flashinfer, check_dense_chunk))
    return found


def _cudnn_unmasked(layer: ChunkLayer) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(layer.query, layer.keys, layer.values, enable_gqa=layer.shape.group > 1)


def _cudnn_in_parts(layer: ChunkLayer) -> torch.Tensor:
    cut = layer.choice_length
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    tensors = (layer.query, layer.keys[:, :, :cut], layer.values[:, :, :cut])
    before, before_lse = attend(*tensors, None, True, is_causal=False)[:2]
    tensors = (layer.query, layer.keys[:, :, cut:], layer.values[:, :, cut:])
    within, within_lse = attend(*tensors, None, True, is_causal=True)[:2]
    return merged(before, before_lse.reshape(within.shape[:3]), within, within_lse.reshape(within.shape[:3]))


def merged(
    first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor
) -> torch.Tensor:
    """Merge attention to two sets of tokens by their log-sum-exps [batch, q_heads, queries]."""
    share = torch.sigmoid(second_lse - first_lse)[..., None].to(first.dtype)
    return torch.lerp(first, second, share)


def _flash(layer: ChunkLayer) -> torch.Tensor:
    mask = causal_lower_right(layer.shape.queries, layer.shape.length)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(
            layer.query, layer.keys, layer.values, attn_mask=mask, enable_gqa=layer.shape.group > 1
        )


def _flashinfer(layer: ChunkLayer) -> torch.Tensor:
    import flashinfer

    output: torch.Tensor = flashinfer.single_prefill_with_kv_cache(
        layer.query[0].transpose(0, 1), layer.keys[0], layer.values[0], causal=True, kv_layout="HND"
    )
    return output.transpose(0, 1)[None]
