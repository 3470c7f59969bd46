"""A real tokenizer, trained in a moment, for tests that count tokens."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from eval.benchmarks.ruler.vocabulary import words

CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def tiny_tokenizer(chat: bool = False, vocabulary: int = 2000) -> PreTrainedTokenizerFast:
    """Create a byte-level BPE that encodes any text losslessly, with offsets, an added BOS token, and an EOS token.

    Shared by the tests; do not change it. ``chat`` gives it a chat template, which strips the message.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    common = "the of and in to is a was that for are with all"
    backend.train_from_iterator([" ".join([*words("noun"), *words("adjective"), common, common])], trainer)
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
