"""Comparison of patched with stock models of every causal decoder, and image-text model, that Transformers has.

``python -m tests.families`` writes docs/families.json, from which docs/compatibility.md has its tables. A supported
family must pass; for a refused one, the file says what happens without the refusal.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from transformers import CONFIG_MAPPING, AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hf_sparse_attn import METHODS, SparseCache, SparseMethod, sparse_attention, sparse_attention_stats
from hf_sparse_attn.patch.families import FAMILIES, MULTIMODAL, Family, refusal
from hf_sparse_attn.patch.rehearsal import query_of
from tests import multimodal
from tests.compared import (
    ALL_FULL,
    BUDGET,
    COVERED,
    OVERRIDES,
    PROMPTS,
    TINY,
    always_sparse,
    answer,
    difference,
    greedy,
    method_of,
    random_model,
    taken,
)

RESULTS = Path(__file__).parents[1] / "docs/families.json"
PLAIN = "tests_plain_attention"
IN_FLOAT32 = ("granite_swa", "granitemoe_swa")
"""Families whose own attention has a softmax in float32, where the mask of a float64 model overflows for padding."""

_WHOLE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
WHOLE_HEADS: dict[str, dict[str, Any]] = {
    name: {"rope_parameters": _WHOLE} for name in ("glm4_moe", "gpt_neox", "persimmon", "phi")
}
"""Settings for methods that rotate whole heads, which these families may have."""


def tiny_model(model_type: str, **overrides: Any) -> PreTrainedModel:
    """Create a random model in float64, with weights large enough for sharp attention and no two norms alike.

    A model that may have sliding windows has one in its first layer, unless ``overrides`` change that.

    Raises
    ------
    ValueError
        The model would not be tiny.
    """
    config_class = CONFIG_MAPPING[model_type]
    wanted, default = {**TINY, **OVERRIDES.get(model_type, {}), **overrides}, config_class()
    if not set(getattr(default, "layer_types", None) or []) <= set(TINY["layer_types"]):
        del wanted["layer_types"]  # it has layers of other kinds
    if hasattr(default, "kv_lora_rank"):
        wanted["num_key_value_heads"] = wanted["num_attention_heads"]
    config = config_class(**taken(default, wanted))
    return random_model(getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]), config)


@dataclass(frozen=True)
class Workload:
    """The prompt that a check decodes, and its sizes.

    Parameters
    ----------
    prompts : dict of torch.Tensor
        ``input_ids`` and ``attention_mask`` [rows, tokens], left-padded.
    max_cache_len : int
        Room for prompts and answers.
    covering_budget, sparse_budget : int
        Token budgets: more than a row has, and less than half of every row.
    """

    prompts: dict[str, torch.Tensor]
    max_cache_len: int
    covering_budget: int
    sparse_budget: int


def left_padded(rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Return ``input_ids`` and ``attention_mask`` [rows, tokens] of rows of different lengths, padded with token 0."""
    length = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[0] * (length - len(row)) + list(row) for row in rows]),
        "attention_mask": torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows]),
    }


def _random_prompts() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return left_padded([torch.randint(2, TINY["vocab_size"], (n,), generator=generator).tolist() for n in PROMPTS])


RANDOM = Workload(_random_prompts(), max_cache_len=80, covering_budget=128, sparse_budget=BUDGET)
"""For tiny models."""


def decode(
    model: PreTrainedModel, cache: Any = None, custom_generate: Any = None, workload: Workload = RANDOM
) -> tuple[torch.Tensor, torch.Tensor]:
    """Continue prompts greedily; return tokens [rows, tokens] and logits [steps, rows, vocabulary]."""
    options = {"past_key_values": cache, "custom_generate": custom_generate, "disable_compile": True}
    return greedy(model, workload.prompts, **options)


def decode_patched(
    model: PreTrainedModel, method: SparseMethod, max_cache_len: int | None, workload: Workload = RANDOM
) -> Any:
    """Return what :func:`decode` returns for a patched model, with a growing or static cache; check that it is sparse.

    Raises
    ------
    ValueError
        No decode step was counted.
    """
    with sparse_attention(model, method):
        result = decode(model, SparseCache.for_model(model, max_cache_len), workload=workload)
        if sparse_attention_stats(model).decode_steps == 0:
            raise ValueError("no decode step ran")
    return result


def covering(model: PreTrainedModel, name: str, workload: Workload = RANDOM) -> str:
    """Compare a budget that covers everything, in growing and in static buffers, with the stock model.

    For families :data:`IN_FLOAT32`, with plain attention in the place of their own.
    """
    is_plain = model.config.model_type in IN_FLOAT32
    budget = workload.covering_budget
    expected = decode_plain(model, budget, workload) if is_plain else decode(model, workload=workload)
    with always_sparse(name):
        return _in_both_buffers(model, method_of(name, budget), expected, workload)


def top_k(model: PreTrainedModel, workload: Workload = RANDOM) -> str:
    """Compare the tokens with the most attention, as a method of a patched model, with plain attention to them."""
    expected = decode_plain(model, workload.sparse_budget, workload)
    return _in_both_buffers(model, method_of("oracle_topk", workload.sparse_budget), expected, workload)


def _in_both_buffers(
    model: PreTrainedModel, method: SparseMethod, expected: tuple[torch.Tensor, torch.Tensor], workload: Workload
) -> str:
    rooms = (workload.max_cache_len, None)
    found = [difference(decode_patched(model, method, room, workload), expected) for room in rooms]
    return next((result for result in found if result != "equal"), "equal")


def rehearsal(model: PreTrainedModel) -> str:
    """Compare the query that a rehearsal makes of an attention's own input with the real one."""
    found: list[str] = []

    def compare(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.shape[1] == 1:
            query = query_of(module, hidden, kwargs["position_embeddings"])
            found.append("equal" if torch.allclose(query, module.seen, rtol=1e-5, atol=1e-5) else "queries differ")

    hooks = [layer.self_attn.register_forward_hook(compare, with_kwargs=True) for layer in model.get_decoder().layers]
    try:
        decode_plain(model, RANDOM.covering_budget)
    finally:
        for hook in hooks:
            hook.remove()
    return next((result for result in found if result != "equal"), "equal" if found else "no decode step ran")


def decode_plain(model: PreTrainedModel, budget: int, workload: Workload = RANDOM) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what :func:`decode` returns for a stock model whose steps read ``budget`` tokens per KV head.

    The tokens are those with the most attention of a KV head's queries together, as of ``oracle_topk``; layers with a
    sliding window read it all.
    """
    layers = DynamicCache(config=model.config).layers
    settings = {"budget": budget, "sparse": {at for at, layer in enumerate(layers) if type(layer) is DynamicLayer}}
    own = model.config._attn_implementation
    model.set_attn_implementation(PLAIN)
    try:
        with patch.dict(_plain_settings, settings):
            return decode(model, workload=workload)
    finally:
        model.set_attn_implementation(own)


_plain_settings: dict[str, Any] = {}


def plain_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by the definition; in decode steps, to the tokens with the most attention, and to sinks if there are."""
    module.seen = query[:, :, -1]
    grouped = query.unflatten(1, (key.shape[1], -1))  # [batch, kv_heads, group, queries, head_dim]
    scores = scaling * grouped @ key[:, :, None].mT
    queries, length = scores.shape[3:]
    at = torch.arange(length)
    mask = (at <= at[-queries:, None])[None, None] if attention_mask is None else attention_mask
    scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
    if queries == 1 and module.layer_idx in _plain_settings["sparse"]:
        total = scores.softmax(-1).sum(2, keepdim=True)
        least = total.topk(min(_plain_settings["budget"], length)).values[..., -1:]
        scores = scores.masked_fill(total < least, float("-inf"))
    if s_aux is not None:
        sinks = s_aux.view(1, key.shape[1], -1, 1, 1).expand(*scores.shape[:4], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1).nan_to_num()[..., :length]  # padding attends to none
    return (weights @ value[:, :, None]).flatten(1, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(PLAIN, plain_attention)
AttentionMaskInterface.register(PLAIN, sdpa_mask)


def supported_results(model_type: str) -> dict[str, Any]:
    """Return the checks' results for a supported family."""
    model, family = tiny_model(model_type), FAMILIES[model_type]
    layers = DynamicCache(config=model.config).layers
    results = {
        "sliding_window_layers": sum(type(layer) is not DynamicLayer for layer in layers),
        "oracle_topk": answer(top_k, model),
    }
    for name in COVERED:
        refused = METHODS[name].rotates_keys and family.rotation
        covers = partial(covering, model if not METHODS[name].rotates_keys else without_windows(model_type))
        results[name] = f"refused: {refused}" if refused else answer(covers, name)
    results["infinigen"] = f"refused: {family.rehearsal}" if family.rehearsal else answer(rehearsal, model)
    return results


def without_windows(model_type: str) -> PreTrainedModel:
    """Create a tiny model whose layers all have full attention."""
    layer_types = None if OVERRIDES.get(model_type) == ALL_FULL else ["full_attention"] * TINY["num_hidden_layers"]
    return tiny_model(model_type, layer_types=layer_types, **WHOLE_HEADS.get(model_type, {}))


def without_refusal(model_type: str) -> str:
    """Return what happens to a refused family that is patched nevertheless."""

    def run_stock_model() -> str:
        decode(tiny_model(model_type))
        return "ran"

    def patch_anyway() -> str:
        model = tiny_model(model_type)
        with patch.dict(FAMILIES, {model.config.model_type: Family()}):
            return covering(model, "quest")

    stock = answer(run_stock_model)
    return answer(patch_anyway) if stock == "ran" else f"the stock model does not run in this check: {stock}"


def main(model_types: list[str]) -> None:
    """Check the model types, or all, and write the results of all."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    versions = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
    results = json.loads(RESULTS.read_text()) if model_types else {kind: {} for kind in KINDS}
    all_types = dict.fromkeys((*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))
    for model_type in model_types or all_types:
        kind = kind_of(model_type)
        results[kind][model_type] = found = KINDS[kind](model_type)
        print(model_type, found, flush=True)
    for kind, found in results.items():
        if kind in KINDS:
            results[kind] = {name: found[name] for name in sorted(found) if kind_of(name) == kind}
    RESULTS.write_text(json.dumps({**results, "versions": versions}, indent=1) + "\n")


def kind_of(model_type: str) -> str:
    """Return which of :data:`KINDS` a model type belongs to."""
    if model_type in MULTIMODAL or model_type in FAMILIES:
        return "multimodal" if model_type in MULTIMODAL else "supported"
    return "refused" if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else "multimodal_refused"


KINDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "supported": supported_results,
    "refused": lambda name: {"reason": refusal(name), "without refusal": without_refusal(name)},
    "multimodal": multimodal.results_of,
    "multimodal_refused": multimodal.reason_of,
}
"""Parts of the results, and the check of a model type in each."""


if __name__ == "__main__":
    main(sys.argv[1:])
