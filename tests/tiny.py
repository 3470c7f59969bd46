"""A tokenizer and a random Llama, created offline in a moment."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_sparse_attn.cli.passkey import FILLER


def make_tokenizer(chat: bool = False) -> PreTrainedTokenizerFast:
    """Create a byte-level tokenizer with some of the filler's words as tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *alphabet]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(sorted({word.strip(".,") for sentence in FILLER for word in sentence.split()}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    if chat:
        tokenizer.chat_template = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
    return tokenizer


def save_model(folder: Path, chat: bool = False) -> Path:
    """Write a random Llama with 1,024 positions and its tokenizer."""
    tokenizer = make_tokenizer(chat)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_model_of(model_type: str, folder: Path, **settings: Any) -> Path:
    """Write a random model of another type, 32 channels wide unless ``settings`` say so, and its tokenizer."""
    tokenizer = make_tokenizer()
    config = AutoConfig.for_model(model_type, **{"vocab_size": len(tokenizer), "hidden_size": 32, **settings})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_bloom(folder: Path) -> Path:
    """Write a model that cannot be patched and states no number of positions."""
    return save_model_of("bloom", folder, n_head=2, n_layer=1)


def save_stablelm(folder: Path) -> Path:
    """Write a model that cannot be patched and states its positions."""
    return save_model_of("stablelm", folder, num_attention_heads=2, num_hidden_layers=1)
