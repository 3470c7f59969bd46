"""The model types that can be patched, what keeps some methods from them, and why others are refused.

``python -m tests.families`` compares patched with stock models of every decoder and every image-text model that
Transformers has, and writes ``docs/families.json``, from which the tables in docs/compatibility.md are generated.
"""

from __future__ import annotations

from dataclasses import dataclass

INTERLEAVED = "its RoPE rotates neighbouring channels, not the halves of a head"
PARTIAL = "its RoPE may cover only a part of each head"
NOT_EVERYWHERE = "some of its layers have no RoPE"
NORM_AFTER_ROPE = "it normalizes queries and keys after RoPE"
ROPE_BY_KIND = "its kinds of layers have different RoPE"
ROPE_BY_LAYER = "its layers may have different RoPE"
SCALED_BY_POSITION = "it scales queries by their positions"
NORM_OF_ALL_HEADS = "it normalizes the queries of all heads together"
CLIPPED = "it may clip queries"
FUSED = "one projection makes its queries, keys and values"
ABSOLUTE = "it has absolute positions instead of RoPE"
MROPE = "its RoPE gives a token of an image three positions (time, height and width), where a slot is one"


@dataclass(frozen=True)
class Family:
    """A supported model type. A field is None, or says why the methods that need something are refused."""

    rotation: str | None = None
    """Why keys cannot be cached before RoPE and rotated by slot, as methods with ``rotates_keys`` do."""
    rehearsal: str | None = None
    """Why a query cannot be made of another layer's input, as methods with ``rehearses`` do."""
    other_rope: str | None = None
    """Why its RoPE cannot be replaced, as methods with ``changes_rope`` do."""


def _families(
    names: str, rotation: str | None = None, rehearsal: str | None = None, other_rope: str | None = None
) -> dict[str, Family]:
    return dict.fromkeys(names.split(), Family(rotation, rehearsal, other_rope))


FAMILIES: dict[str, Family] = {
    **_families("llama mistral qwen2 qwen3"),
    **_families(
        "apertus apertus1p5_text arcee aria_text bitnet cwm dots1 exaone gemma gpt_oss granite granitemoe "
        "granitemoeshared hy_v3 hyperclovax"
    ),
    **_families("internlm3 iquestcoder jais2 ministral mixtral phimoe qwen2_moe qwen3_moe seed_oss starcoder2"),
    **_families("cohere cohere2 cohere2_moe ernie4_5 ernie4_5_moe glm glm4 helium", INTERLEAVED, INTERLEAVED),
    **_families(
        "afmoe beam exaone4 exaone_moe flint granite_swa granitemoe_swa kolibri1 smollm3",
        NOT_EVERYWHERE,
        NOT_EVERYWHERE,
    ),
    **_families("hunyuan_v1_dense hunyuan_v1_moe nanochat", NORM_AFTER_ROPE, NORM_AFTER_ROPE),
    **_families("gemma3_text mellum", ROPE_BY_KIND),
    **_families("olmo3", ROPE_BY_KIND, NORM_OF_ALL_HEADS),
    **_families("ministral3", SCALED_BY_POSITION, SCALED_BY_POSITION),
    **_families("flex_olmo minimax_m2 olmo2 olmoe", rehearsal=NORM_OF_ALL_HEADS),
    **_families("glm4_moe phi sarvam_moe solar_open", rehearsal=PARTIAL),
    **_families("olmo", rehearsal=CLIPPED),
    **_families("phi3", rehearsal=FUSED),
    **_families("laguna", ROPE_BY_KIND, PARTIAL),
    **_families("gpt_neox persimmon", rehearsal=FUSED),
    **_families("biogpt ctrl gpt-sw3 gpt2 gpt_bigcode opt", ABSOLUTE, ABSOLUTE, ABSOLUTE),
}
"""Supported model types; ``python -m tests.families`` shows that each keeps the contract."""

DECODERS: dict[str, Family] = {
    **_families("glm4v_moe_text glm4v_text glm_ocr_text qwen2_5_omni_text qwen2_5_vl_text", MROPE, MROPE, MROPE),
    **_families("qwen2_vl_text qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text", MROPE, MROPE, MROPE),
    **_families("cosmos3_edge_text ernie4_5_vl_moe_text hunyuan_vl_text paddleocr_vl_text", MROPE, MROPE, MROPE),
    **_families("step3p5", ROPE_BY_LAYER, PARTIAL, ROPE_BY_LAYER),
    **_families("molmo2_text", ROPE_BY_LAYER, NORM_OF_ALL_HEADS, ROPE_BY_LAYER),
    **_families("muse_glimmer_text muse_spark_text", NOT_EVERYWHERE, NOT_EVERYWHERE, ROPE_BY_LAYER),
    **_families("deepseek_ocr2_text granite_docling_text"),
}
"""Supported text decoders that exist only inside multimodal models."""

_MULTIMODAL = (
    "apertus1p5 aria aya_vision cohere2_vision cosmos3_edge cosmos3_omni deepseek_ocr2 deepseek_vl deepseek_vl_hybrid "
    "ernie4_5_vl_moe exaone4_5 gemma3 glm46v glm4v glm4v_moe glm_ocr glmga got_ocr2 granite_docling hunyuan_vl "
    "hyperclovax_vision_v2 idefics2 idefics3 internvl janus lighton_ocr llava llava_next llava_next_video "
    "llava_onevision mistral3 molmo2 muse_glimmer muse_spark ovis2 paddleocr_vl pp_chart2table qianfan_ocr "
    "qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe shieldgemma2 smolvlm "
    "step3p7 video_llama_3 video_llava vipllava"
)
MULTIMODAL: tuple[str, ...] = tuple(_MULTIMODAL.split())
"""Types of multimodal models that are supported if their text decoder is. Text and images were checked."""

REFUSED: dict[str, str] = {
    "its attention scores are capped": "gemma2 vaultgemma",
    "its latent attention has keys and values of different head dimensions, or caches something else": (
        "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots3_note dots3_note_text glm4_moe_lite glm5_next "
        "glm_moe_dsa hy_v4 hy_v4_vl_text longcat_flash minicpm3 mistral4 mistral_large4 sarvam_mla youtu"
    ),
    "its keys and values have different head dimensions": "mimo_v2_flash",
    "some of its layers keep a state instead of keys and values, or beside them": (
        "bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid inkling2_loop_text inkling2_text inkling_text "
        "jamba kimi_linear lara_mini lfm2 lfm2_moe lfm3 mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5 "
        "qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma rwkv xlstm "
        "zamba zamba2 zaya"
    ),
    "some of its layers read the keys and values of others": (
        "gemma3n gemma3n_text gemma4 gemma4_assistant gemma4_text gemma4_unified gemma4_unified_assistant "
        "gemma4_unified_text"
    ),
    "its attention is sparse already": "doge minimax_m3_vl_text",
    "its layers attend within chunks of the text": "llama4 llama4_text",
    "a token's attention mixes two softmaxes": "diffllama",
    "its query heads share key-value heads in another order": "jetmoe",
    "its decoder does not pass arguments on to the attention function": "modernbert-decoder nemotron stablelm",
    "its attention adds biases by distance": "bloom mpt",
    "it decodes beside an encoder, or attends to its output": (
        "bart bigbird_pegasus blenderbot blenderbot-small blt git marian mbart mllama moshi musicgen musicgen_melody "
        "mvp pegasus plbart prophetnet trocr whisper"
    ),
    "its tokens attend to later ones, unless it is made a decoder": (
        "bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm roc_bert xlm-roberta "
        "xlm-roberta-xl xmod"
    ),
    "it runs its layers several times for a token": "dory hrm_text",
    "it does not call Transformers' attention interface": (
        "big_bird codegen cpmant falcon gpt_neo gpt_neox_japanese gptj megatron-bert openai-gpt reformer rembert "
        "roformer xglm xlm xlnet"
    ),
    "it reads more than text; its language model may be supported": (
        "cohere_compass_text emu3 fuyu moss_transcribe_diarize phi4_multimodal"
    ),
    "its configuration nests that of the attention": "dbrx",
    "its prompts with images have not been checked": "fast_vlm perception_lm",
    "its tokens attend to later ones of the prompt, also to those of text": "paligemma",
}
"""Model types that are refused, by the reason."""

UNKNOWN = "it has not been checked"
MODELS_IN_SHORT = 4


def in_short() -> str:
    """Return the supported model types for an error message: the first ones, and the number of the others."""
    named = list(FAMILIES)[:MODELS_IN_SHORT]
    return f"{', '.join(named)} and {len(FAMILIES) - len(named)} other model types, see docs/compatibility.md"


def refusal(model_type: str, text_type: str | None = None) -> str:
    """Return why a model type that is not supported is refused.

    ``text_type`` is that of a multimodal model's text decoder.
    """
    reason = next((reason for reason, names in REFUSED.items() if model_type in names.split()), UNKNOWN)
    if reason is not UNKNOWN or text_type in (None, model_type, *FAMILIES, *DECODERS):
        return reason
    return f"its text decoder is of type {text_type!r}: {refusal(str(text_type))}"
