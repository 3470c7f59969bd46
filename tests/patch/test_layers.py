"""Models whose layers are copies, come from another model, or do not agree with the configuration."""

import copy

import pytest
import torch

from hf_sparse_attn import SparseCache, patch_model, sparse_attention, unpatch_model
from hf_sparse_attn.patch.patch import IMPLEMENTATIONS
from tests.models import SPARSE, make_model, random_ids

pytestmark = pytest.mark.usefixtures("exact")
METHODS = pytest.mark.parametrize("method_name", ["quest", "tokenselect", "keycodes", "h2o", "ntk"])


def _options(method_name):
    return {"factor": 1.0} if method_name == "ntk" else {"token_budget": 512, **SPARSE.get(method_name, {})}


def _model():
    return make_model("llama", dtype=torch.float64, num_hidden_layers=4)


def _answer(model):
    ids = random_ids(2, 60)
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)


def _with_copied_layer():
    model = _model()
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])
    return model


def _with_layers_of(large):
    """Return a model of the first three layers of another one, whose modules it shares."""
    config = copy.deepcopy(large.config)
    config.num_hidden_layers = 3
    small = type(large)(config).to(large.device, torch.float64).eval()
    small.lm_head = large.lm_head
    small.model.embed_tokens, small.model.norm = large.model.embed_tokens, large.model.norm
    small.model.layers = torch.nn.ModuleList(large.model.layers[:3])
    return small


def _implementations(model):
    return {layer.self_attn.config._attn_implementation for layer in model.model.layers}


@METHODS
@pytest.mark.parametrize("make", [_with_copied_layer, lambda: _with_layers_of(_model())], ids=["copied", "shared"])
def test_layers_with_a_configuration_of_their_own_are_patched(make, method_name):
    model = make()
    configs = [layer.self_attn.config for layer in model.model.layers]
    expected = _answer(model)
    patch_model(model, method_name, **_options(method_name))
    assert torch.equal(_answer(model), expected)
    assert _implementations(model) < set(IMPLEMENTATIONS)
    unpatch_model(model)
    assert all(layer.self_attn.config is own for layer, own in zip(model.model.layers, configs, strict=True))
    assert _implementations(model) == {"sdpa"}
    assert torch.equal(_answer(model), expected)


def test_a_model_that_shares_layers_is_refused_until_the_other_is_unpatched():
    large = _model()
    small = _with_layers_of(large)
    expected = _answer(large)
    patch_model(small, "quest", token_budget=512)
    with pytest.raises(
        ValueError, match="a layer of this LlamaForCausalLM is, or is a copy of, one of a model that is"
    ):
        patch_model(large, "quest", token_budget=512)
    with pytest.raises(ValueError, match="not patched"):
        _answer(large)
    patch_model(small, "keycodes", token_budget=512)  # its own layers may be patched anew
    unpatch_model(small)
    assert torch.equal(_answer(large), expected)
    with sparse_attention(large, "quest", token_budget=512):
        assert torch.equal(_answer(large), expected)


def test_a_layer_put_into_a_patched_model_is_an_error_until_it_is_patched_again():
    model, other = _model(), _model()
    model.load_state_dict(other.state_dict())
    expected = _answer(model)
    patch_model(model, "quest", token_budget=512)
    model.model.layers[2] = other.model.layers[2]
    with pytest.raises(
        ValueError, match="a layer of this patched LlamaForCausalLM has the attention implementation 'sdpa'"
    ):
        _answer(model)
    patch_model(model, "quest", token_budget=512)
    assert torch.equal(_answer(model), expected)


def test_copies_of_patched_layers_are_unpatched_with_their_model():
    model = patch_model(_model(), "quest", token_budget=512)
    model.model.layers.append(copy.deepcopy(model.model.layers[3]))
    model.model.layers[4].self_attn.layer_idx = 4
    unpatch_model(model)
    model.config.num_hidden_layers = 5
    model.config.layer_types = ["full_attention"] * 5
    assert _implementations(model) == {"sdpa"}
    expected = _answer(model)
    patch_model(model, "quest", token_budget=512)
    assert torch.equal(_answer(model), expected)


@pytest.mark.parametrize("dropped", [1, 3])
def test_a_pruned_model_is_refused_until_its_configuration_agrees(dropped):
    model = _model()
    del model.model.layers[dropped]
    with pytest.raises(
        ValueError, match=rf"has no layer of layer_idx {dropped}, .* asks for 4 \(num_hidden_layers=4\)"
    ):
        patch_model(model, "quest", token_budget=512)
    assert _implementations(model) == {"sdpa"}
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    model.config.num_hidden_layers, model.config.layer_types = 3, ["full_attention"] * 3
    expected = _answer(model)
    patch_model(model, "quest", token_budget=512)
    assert torch.equal(_answer(model), expected)


@METHODS
def test_a_model_that_is_pruned_after_it_was_patched_raises(method_name):
    model = patch_model(_model(), method_name, **_options(method_name))
    del model.model.layers[3]
    cache, ids = SparseCache.for_model(model), random_ids(1, 40)
    with pytest.raises(ValueError, match=r"has 4 layers, of which the model that has run has none for 3 \("):
        model(ids, past_key_values=cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("method_name", ["quest", "h2o"])
@pytest.mark.parametrize(
    ("config", "described"),
    [
        ({"num_hidden_layers": 3}, "3 layers of 6 query heads and 2 KV heads, of 16 channels each"),
        ({"num_hidden_layers": 6}, "6 layers of 6 query heads"),
        ({"num_attention_heads": 4}, "4 layers of 4 query heads"),
        ({"num_key_value_heads": 3}, "4 layers of 6 query heads and 3 KV heads"),
        ({"head_dim": 32}, "4 layers of 6 query heads and 2 KV heads, of 32 channels each"),
    ],
)
def test_a_cache_of_another_models_shape_is_refused(method_name, config, described):
    shape = {"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    owner, other = (make_model("llama", **{**shape, **changed}) for changed in ({}, config))
    for model in (owner, other):
        patch_model(model, method_name, token_budget=48, **SPARSE.get(method_name, {}))
    cache, ids = SparseCache.for_model(owner), random_ids(1, 40)
    owner(ids, past_key_values=cache)
    with pytest.raises(
        ValueError, match=f"created for a model of 4 layers of 6 query heads.* this one has {described}"
    ):
        other(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="created for a model of 4 layers"):
        other.generate(random_ids(1, 44), past_key_values=cache, max_new_tokens=2)
    assert cache.get_seq_length() == 40
    assert owner(ids[:, :1], past_key_values=cache).logits.isfinite().all()


def test_a_window_for_every_layer_that_is_set_later_is_an_error():
    model = patch_model(make_model("mistral"), "quest", token_budget=48)
    model.config.sliding_window = 8
    with pytest.raises(ValueError, match="every layer of this cache has a sliding window"):
        model(random_ids(1, 20))


def test_a_decoder_in_training_mode_is_refused():
    model = make_model("llama")
    model.model.train()
    model.training = False
    with pytest.raises(ValueError, match="training mode"):
        patch_model(model, "quest", token_budget=48)
    patch_model(model.eval(), "quest", token_budget=48)
    model.model.train()
    with pytest.raises(ValueError, match="training mode"):
        model(random_ids(1, 20))
