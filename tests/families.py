"""Comparison of patched with stock models of every causal decoder that Transformers has.

``python -m tests.families`` writes docs/families.json, from which docs/compatibility.md has its tables. A supported
family must pass; for a refused one, the file says what happens without the refusal.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from transformers import CONFIG_MAPPING, AttentionInterface, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_sparse_attn import METHODS, SparseCache, SparseMethod, sparse_attention, sparse_attention_stats
from hf_sparse_attn.patch.families import FAMILIES, Family, refusal
from hf_sparse_attn.patch.rehearsal import query_of

RESULTS = Path(__file__).parents[1] / "docs/families.json"
COVERED = ("quest", "keycodes", "tokenselect")
BUDGET = 24
"""Tokens that a step reads where the budget is sparse: under half of every row."""
PROMPTS = (57, 33)
NEW_TOKENS = 6
MAX_CACHE_LEN = 80
MAX_PARAMETERS = 20e6
ROUNDING = 1e-5
"""Of logits, relative to the largest: norms work in float32 in a float64 model too."""
PLAIN = "tests_plain_attention"
IN_FLOAT32 = ("granite_swa", "granitemoe_swa")
"""Families whose own attention has a softmax in float32, where the mask of a float64 model overflows for padding."""

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "use_cache": True,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
"""Settings of a tiny model; a configuration takes those that it has."""
ALL_FULL = {"layer_types": None, "sliding_window": None}
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["mistral", "mixtral", "phi3", "phimoe", "starcoder2", "ministral3"], ALL_FULL),
    "qwen2": {"use_sliding_window": True},
    "qwen2_moe": {"use_sliding_window": True},
    "qwen3": {"use_sliding_window": True},
    "qwen3_moe": ALL_FULL,
    "mimo_v2_flash": {"v_head_dim": 24},
    "smollm3": {"no_rope_layers": [1, 0, 1], **ALL_FULL},
}

_WHOLE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
WHOLE_HEADS: dict[str, dict[str, Any]] = {name: {"rope_parameters": _WHOLE} for name in ("glm4_moe", "phi")}
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
    settings = {
        name: value for name, value in wanted.items() if hasattr(default, name) and not _is_derived(default, name)
    }
    torch.manual_seed(0)
    config = config_class(**settings)
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in model_class(config).parameters())
    if parameters > MAX_PARAMETERS:
        raise ValueError(f"no tiny configuration: {parameters} parameters")
    model = model_class(config).double().eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others do not take float64
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data = 0.2 * noise if parameter.dim() > 1 else parameter.data + 0.1 * noise
    return model


def _is_derived(config: PreTrainedConfig, name: str) -> bool:
    attribute = getattr(type(config), config.attribute_map.get(name, name), None)
    return isinstance(attribute, property) and attribute.fset is None


def decode(model: PreTrainedModel, cache: Any = None, custom_generate: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Continue left-padded prompts greedily; return tokens [rows, tokens] and logits [steps, rows, vocabulary]."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, TINY["vocab_size"], (len(PROMPTS), max(PROMPTS)), generator=generator)
    mask = (torch.arange(max(PROMPTS)) >= max(PROMPTS) - torch.tensor(PROMPTS)[:, None]).long()
    output = model.generate(
        ids * mask,
        attention_mask=mask,
        past_key_values=cache,
        custom_generate=custom_generate,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        disable_compile=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences, torch.stack(output.logits)


def difference(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> str:
    """Return "equal", or how two results of :func:`decode` differ."""
    logits = float((actual[1][0] - expected[1][0]).abs().max() / expected[1].abs().max())
    if not torch.equal(actual[0], expected[0]):
        return "tokens differ" + (", from the prefill on" if not logits < ROUNDING else "")
    logits = float((actual[1] - expected[1]).abs().max() / expected[1].abs().max())
    return "equal" if logits < ROUNDING else f"logits differ by {logits:.0e}"


def method_of(name: str, budget: int) -> SparseMethod:
    """Create a method that is sparse in every full-attention layer."""
    pages = {"page_size": 16} if name == "keycodes" else {}
    dense = {"dense_layers": 0} if name == "quest" else {}
    return METHODS[name](token_budget=budget, **pages, **dense)


@contextmanager
def always_sparse(name: str) -> Iterator[None]:
    """Keep a method from its dense shortcut, so that its steps run even if they select everything."""
    with patch.object(METHODS[name], "covers", lambda self, length: False):
        yield


def decode_patched(model: PreTrainedModel, method: SparseMethod, max_cache_len: int | None) -> Any:
    """Return what :func:`decode` returns for a patched model, with a growing or static cache; check that it is sparse.

    Raises
    ------
    ValueError
        No decode step was counted.
    """
    with sparse_attention(model, method):
        result = decode(model, SparseCache.for_model(model, max_cache_len))
        if sparse_attention_stats(model).decode_steps == 0:
            raise ValueError("no decode step ran")
    return result


def covering(model: PreTrainedModel, name: str) -> str:
    """Compare a budget that covers everything, in growing and in static buffers, with the stock model.

    For families :data:`IN_FLOAT32`, with plain attention in the place of their own.
    """
    is_plain = model.config.model_type in IN_FLOAT32
    expected, method = decode_plain(model, MAX_CACHE_LEN) if is_plain else decode(model), method_of(name, 128)
    with always_sparse(name):
        found = [difference(decode_patched(model, method, room), expected) for room in (MAX_CACHE_LEN, None)]
    return next((result for result in found if result != "equal"), "equal")


def top_k(model: PreTrainedModel) -> str:
    """Compare the tokens with the most attention, as a method of a patched model, with plain attention to them."""
    expected, method = decode_plain(model, BUDGET), method_of("oracle_topk", BUDGET)
    found = [difference(decode_patched(model, method, room), expected) for room in (MAX_CACHE_LEN, None)]
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
        decode_plain(model, MAX_CACHE_LEN)
    finally:
        for hook in hooks:
            hook.remove()
    return next((result for result in found if result != "equal"), "equal" if found else "no decode step ran")


def decode_plain(model: PreTrainedModel, budget: int) -> tuple[torch.Tensor, torch.Tensor]:
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
            return decode(model)
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


def answer(check: Callable[..., str], *arguments: Any) -> str:
    """Return a check's result, or its error on one line."""
    try:
        with torch.inference_mode():
            return check(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


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
    results = json.loads(RESULTS.read_text()) if model_types else {"supported": {}, "refused": {}}
    for model_type in model_types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if model_type in FAMILIES:
            results["supported"][model_type] = found = supported_results(model_type)
        else:
            found = {"reason": refusal(model_type), "without refusal": without_refusal(model_type)}
            results["refused"][model_type] = found
        print(model_type, found, flush=True)
    for kind, is_supported in (("supported", True), ("refused", False)):
        kept = sorted(name for name in results[kind] if (name in FAMILIES) is is_supported)
        results[kind] = {name: results[kind][name] for name in kept}
    RESULTS.write_text(json.dumps({**results, "versions": versions}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
