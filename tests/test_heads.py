"""Numbers and widths of heads, however a configuration states them."""

import pytest
from transformers import GPT2Config, LlamaConfig

from hf_sparse_attn.heads import head_dim_of, kv_heads_of, query_heads_of

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}


def test_numbers_of_all_layers():
    config = LlamaConfig(**SIZES)
    assert (head_dim_of(config), kv_heads_of(config), query_heads_of(config)) == (16, 2, [4, 4, 4])
    config = GPT2Config(n_embd=64, n_head=4, n_layer=2)  # neither the width of a head nor KV heads
    assert (head_dim_of(config), kv_heads_of(config), query_heads_of(config)) == (16, 4, [4, 4])


def test_query_heads_may_differ_from_layer_to_layer():
    config = LlamaConfig(**SIZES)
    config.per_layer_config = {1: {"num_attention_heads": 2}}
    assert (head_dim_of(LlamaConfig(**SIZES)), kv_heads_of(config), query_heads_of(config)) == (16, 2, [4, 2, 4])
    config = LlamaConfig(**SIZES, num_attention_heads_per_layer=[4, 6, 2])
    assert query_heads_of(config) == [4, 6, 2]


@pytest.mark.parametrize(("name", "get"), [("num_key_value_heads", kv_heads_of), ("head_dim", head_dim_of)])
def test_what_must_be_the_same_in_all_layers_is_named(name, get):
    config = LlamaConfig(**SIZES, per_layer_config={1: {name: 4}})
    with pytest.raises(ValueError, match=rf"'llama'\) differ in {name}, which is not supported; allowed: one number"):
        get(config)
