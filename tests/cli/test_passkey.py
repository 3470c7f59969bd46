import pytest
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerFast

from hf_sparse_attn.cli.passkey import answer_passkey, make_passkey
from tests.tiny import make_tokenizer, save_model

TOKENIZER = make_tokenizer()


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return TOKENIZER


@pytest.mark.parametrize("num_tokens", [400, 777, 2000])
@pytest.mark.parametrize("depth", [0.0, 0.3, 0.5, 1.0])
def test_length_and_depth(tokenizer: PreTrainedTokenizerFast, num_tokens: int, depth: float) -> None:
    passkey = make_passkey(tokenizer, num_tokens, depth, seed=3)
    assert len(passkey.material_ids) == num_tokens
    text = tokenizer.decode(list(passkey.material_ids))
    assert text.count(f"The pass key is {passkey.answer}.") == 1
    before, after = text.split(f"The pass key is {passkey.answer}.")
    filler_before = len(tokenizer(before)["input_ids"]) - len(tokenizer(before.split("\n\n")[0] + "\n\n")["input_ids"])
    filler_after = len(tokenizer(after.split("is the pass key.")[1])["input_ids"])
    assert filler_before / (filler_before + filler_after) == pytest.approx(depth, abs=0.15)
    assert passkey.answer not in tokenizer.decode(list(passkey.question_ids))


def test_key_follows_the_seed(tokenizer: PreTrainedTokenizerFast) -> None:
    keys = {make_passkey(tokenizer, 500, 0.5, seed).answer for seed in (0, 0, 1, 2)}
    assert len(keys) == 3
    assert all(len(key) == 5 and key.isdigit() for key in keys)


def test_custom_filler(tokenizer: PreTrainedTokenizerFast) -> None:
    passkey = make_passkey(tokenizer, 400, 0.5, 0, filler=["Nothing to see."])
    assert "Nothing to see. Nothing to see." in tokenizer.decode(list(passkey.material_ids))


@pytest.mark.parametrize(("depth", "num_tokens", "name"), [(1.5, 500, "depth=1.5"), (0.5, 10, "num_tokens=10")])
def test_bad_values_are_named(tokenizer: PreTrainedTokenizerFast, depth: float, num_tokens: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        make_passkey(tokenizer, num_tokens, depth, 0)


def test_empty_filler_is_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"filler=\[\]"):
        make_passkey(tokenizer, 500, 0.5, 0, filler=[])


def test_answer_counts_its_steps(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path_factory.mktemp("model"))).eval()
    passkey = make_passkey(tokenizer, 400, 0.5, 0)
    cache = DynamicCache(config=model.config)
    ticks: list[int] = []
    answer = answer_passkey(model, tokenizer, passkey, cache, max_new_tokens=4, on_step=lambda: ticks.append(1))
    assert 0 < len(answer.token_ids) <= 4
    assert len(ticks) == 1 + answer.decode_steps
    assert cache.get_seq_length() == 400 + answer.decode_steps
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        answer_passkey(model, tokenizer, passkey, cache, max_new_tokens=0)
