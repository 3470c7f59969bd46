"""Real weights in Transformers' tools: a streamed chat, and speculative decoding with a sparse draft."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import TextIteratorStreamer, pipeline

from hf_sparse_attn import patch_model, sparse_attention, sparse_attention_stats
from hf_sparse_attn.cli.models import load_model
from hf_sparse_attn.cli.passkey import make_passkey
from tests.tools.checks import sparse_methods

pytestmark = pytest.mark.weights
SMALL = {"token_budget": 128}
SMALLER = {"rabitqcache": {"page_size": 32, "sink_tokens": 32}, "snapkv": {"window": 16}}
"""Parameters of methods whose defaults take more of this budget than they can."""
FORGET_THE_KEY = ("streaming_llm", "h2o", "duo_attention")
"""Methods that evict the key before the question asks for it: it is neither recent nor attended to by most tokens."""


MISS_THE_KEY = (*FORGET_THE_KEY, "infinigen")
"""Those, and a method whose rehearsal with the previous layer's input is too rough in so small a model."""


@pytest.fixture(scope="module")
def loaded():
    return load_model("smollm2", device="cpu")


@pytest.fixture(scope="module")
def messages(loaded):
    """Return a chat whose answer is hundreds of tokens before its question."""
    passkey = make_passkey(loaded[1], 800, depth=0.4, seed=1)
    text = loaded[1].decode([*passkey.material_ids, *passkey.question_ids])
    return passkey, [{"role": "user", "content": text}]


def greedy(**options):
    return {"max_new_tokens": 12, "do_sample": False, **options}


@sparse_methods
def test_a_chat_in_a_pipeline_streams_the_key_that_it_found(method_name, loaded, messages):
    model, tokenizer = loaded
    passkey, chat = messages
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=120)
    with sparse_attention(model, method_name, **SMALL, **SMALLER.get(method_name, {})), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, chat, streamer=streamer, return_full_text=False, **greedy())
        streamed = "".join(streamer)
        assert answer.result()[0]["generated_text"] == streamed
        assert sparse_attention_stats(model).kv_fraction < 1
    assert passkey.found_in(streamed) == (method_name not in MISS_THE_KEY)


def test_a_sparse_draft_is_mostly_right(loaded, messages):
    """Drafting sparsely and verifying densely with the same weights yields the dense text in fewer dense passes."""
    model, tokenizer = loaded
    prompt = tokenizer.apply_chat_template(
        messages[1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    expected = model.generate(**prompt, **greedy())
    new_tokens = expected.shape[1] - prompt["input_ids"].shape[1]
    draft = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    patch_model(draft, "quest", **SMALL)
    passes = []
    hook = model.model.register_forward_hook(lambda *args: passes.append(1))
    output = model.generate(**prompt, assistant_model=draft, **greedy())
    hook.remove()
    assert torch.equal(output, expected)
    assert len(passes) <= new_tokens / 2
    assert sparse_attention_stats(draft).kv_fraction < 1
