"""The cache is taken under the name that this Transformers has for it, and under the former one."""

import pytest
import torch

from hf_sparse_attn import SparseCache, cache_argument, sparse_attention
from hf_sparse_attn.cache_argument import CACHE, OLD_NAME, renamed
from tests.models import make_model, random_ids

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")


@torch.inference_mode()
def test_models_decoders_and_generate_take_it_by_both_names():
    model, ids = make_model("llama", num_hidden_layers=3), random_ids(1, 80)
    with sparse_attention(model, "quest", token_budget=48):
        answers = []
        for name in dict.fromkeys((CACHE, OLD_NAME)):
            for call in (model, model.get_decoder()):
                cache = SparseCache.for_model(model)
                output = call(ids, **{name: cache})
                assert output[CACHE] is cache
                assert cache.get_seq_length() == 80
            cache = SparseCache.for_model(model)
            options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "disable_compile": True}
            answers.append(model.generate(ids, **{name: cache}, **options))
            assert cache.get_seq_length() == 85
    assert all(torch.equal(each, answers[0]) for each in answers)


def test_the_former_name_is_replaced_only_where_there_is_a_new_one(monkeypatch):
    given = {OLD_NAME: "cache", "use_cache": True}
    monkeypatch.setattr(cache_argument, "CACHE", "cache")
    assert renamed(given) == {"cache": "cache", "use_cache": True}
    assert renamed({OLD_NAME: "old", "cache": "new"}) == {"cache": "new"}
    assert renamed({"use_cache": False}) == {"use_cache": False}
    monkeypatch.setattr(cache_argument, "CACHE", OLD_NAME)
    assert renamed(given) is given
