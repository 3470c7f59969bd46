"""Transformers' pipelines and streamers, and chats that keep their cache."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import TextIteratorStreamer, TextStreamer, pipeline

from hf_sparse_attn import SparseCache, sparse_attention
from hf_sparse_attn.cli.passkey import FILLER
from tests.tiny import make_tokenizer
from tests.tools.checks import GREEDY, check_tool, covers_all, exact_model, quest_first, small, sparse_methods

LONG, SHORT = " ".join(FILLER * 3), FILLER[0]
CHAT = [{"role": "user", "content": LONG}]
LONGER_CHAT = [*CHAT, {"role": "assistant", "content": SHORT}, {"role": "user", "content": LONG}]
TOKENS = {**GREEDY, "pad_token_id": None}  # the tokenizer's


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = make_tokenizer(chat=True)
    tokenizer.padding_side = "left"
    return tokenizer


@pytest.fixture(scope="module")
def model(tokenizer):
    return exact_model(vocab_size=len(tokenizer))


@quest_first
@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(LONG, id="text"),
        pytest.param([LONG, LONG, SHORT, LONG], id="texts, padded"),
        pytest.param(CHAT, id="chat"),
        pytest.param([LONGER_CHAT, CHAT], id="chats, padded"),
    ],
)
def test_a_pipeline(inputs, method_name, model, tokenizer):
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    check_tool(lambda: generate(inputs, batch_size=2, **TOKENS), model, method_name)


@sparse_methods
def test_a_streamer_in_a_thread(method_name, model, tokenizer):
    prompt = tokenizer(LONG, return_tensors="pt")

    def run():
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(model.generate, **prompt, streamer=streamer, **TOKENS)
            text = "".join(streamer)
            assert text == tokenizer.decode(whole.result()[0, prompt["input_ids"].shape[1] :])
        return text

    check_tool(run, model, method_name)


@sparse_methods
def test_a_streamer_that_prints(method_name, model, tokenizer, capsys):
    prompt = tokenizer(LONG, return_tensors="pt")

    def run():
        model.generate(**prompt, streamer=TextStreamer(tokenizer, skip_prompt=True), **TOKENS)
        return capsys.readouterr().out

    check_tool(run, model, method_name)


def chat(model, tokenizer, keeps_cache):
    """Run three turns; return the conversation's tokens, and the number of tokens fed to the model."""
    fed = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda module, args: fed.append(args[0].shape[1]))
    conversation, cache = torch.empty(1, 0, dtype=torch.long), None
    for text in (LONG, SHORT, SHORT):
        turn = tokenizer.apply_chat_template([{"role": "user", "content": text}], return_tensors="pt", return_dict=True)
        conversation = torch.cat([conversation, turn["input_ids"]], dim=1)
        output = model.generate(
            conversation,
            attention_mask=torch.ones_like(conversation),
            past_key_values=cache,
            return_dict_in_generate=True,
            **TOKENS,
        )
        conversation, cache = output.sequences, output.past_key_values if keeps_cache else None
    hook.remove()
    return conversation, sum(fed)


@sparse_methods
def test_a_chat_goes_on_with_the_cache_that_generate_returned(method_name, model, tokenizer):
    expected, all_tokens = chat(model, tokenizer, keeps_cache=False)
    with sparse_attention(model, method_name, **covers_all(method_name)):
        from_scratch, _ = chat(model, tokenizer, keeps_cache=False)
        kept, tokens = chat(model, tokenizer, keeps_cache=True)
    assert torch.equal(kept, expected)
    assert torch.equal(from_scratch, expected)
    assert tokens == expected.shape[1] - 1  # each once; the last one is not fed
    assert tokens < all_tokens / 2
    check_tool(lambda: chat(model, tokenizer, keeps_cache=True)[0], model, method_name)


def test_a_returned_cache_is_a_sparse_cache_of_the_method(model, tokenizer):
    prompt = tokenizer(LONG, return_tensors="pt")
    with sparse_attention(model, "quest", **small("quest")):
        cache = model.generate(**prompt, return_dict_in_generate=True, **TOKENS).past_key_values
    assert isinstance(cache, SparseCache)
    with (
        sparse_attention(model, "tokenselect", **small("tokenselect")),
        pytest.raises(ValueError, match=r"was created for Quest\(.*patched with TokenSelect\("),
    ):
        model.generate(**prompt, past_key_values=cache, **TOKENS)
