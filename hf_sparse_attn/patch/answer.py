"""An answer of ``generate()`` in a loop of the package's own: its tokens, its scores, and the model's arguments."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode

from hf_sparse_attn.cache.cache import SparseCache
from hf_sparse_attn.cache_argument import CACHE
from hf_sparse_attn.patch.fused import ONE_ROW
from hf_sparse_attn.patch.generation import MODE_OF_CALL
from hf_sparse_attn.patch.pass_graph import PassGraph
from hf_sparse_attn.patched import get_patch

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList


def check_call(name: str, model: PreTrainedModel, config: GenerationConfig) -> None:
    """Raise ``ValueError`` if ``custom_generate``, called ``name``, does not support the model, mode or an output."""
    if get_patch(model).takes_prefix:
        raise ValueError(f"{name} does not support PEFT's prefix tuning, whose prefix begins a cache of its own")
    mode = getattr(config, MODE_OF_CALL, None) or config.get_generation_mode()  # which knows no assistant
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"{name} supports greedy decoding and sampling, got {mode.value.replace('_', ' ')}")
    if config.output_hidden_states:
        raise ValueError(f"output_hidden_states must be False for {name}, got True")


@dataclass(eq=False, repr=False)
class Answer:
    """One call of ``generate()``."""

    model: Any
    cache: SparseCache
    ids: torch.Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: Any
    kwargs: dict[str, Any]
    """Arguments of the model, whose mask and positions cover all tokens."""

    def __post_init__(self) -> None:
        """Begin with the prompt."""
        device = self.ids.device
        self.unfinished = torch.ones(len(self.ids), dtype=torch.long, device=device)
        self.stops_at_eos = any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)
        self.pad = self.config._pad_token_tensor.to(device) if self.stops_at_eos else None
        self.prompt_length = self.ids.shape[1]
        self.scores: tuple[torch.Tensor, ...] = ()
        self.logits: tuple[torch.Tensor, ...] = ()
        self.compiles = self.model._valid_auto_compile_criteria(self.kwargs, self.config)
        self._room: int | None = None
        """Tokens that a cache with ``max_cache_len`` has room for after the prompt; None for no limit."""
        self._steps: PassGraph | None = None
        """Decode steps recorded as a CUDA graph; None to run them as ``generate()`` does."""
        self._fuses = False
        """Whether products of one row have their own kernel in compiled steps."""

    @property
    def generated(self) -> int:
        """New tokens per row."""
        return int(self.ids.shape[1]) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return int(self.config.max_length - self.ids.shape[1])

    @property
    def is_full(self) -> bool:
        """Whether the text has its maximum length."""
        return self.remaining <= 0

    def prompt_logits(self) -> torch.Tensor:
        """Feed the prompt; return a float32 copy of the logits after it, [batch, vocabulary]."""
        logits = self.exact(self.model._prefill(self.ids, self.config, self.kwargs).logits[:, -1])
        self._extend(self.kwargs, 1)
        if self.cache.max_cache_len >= 0:  # also where steps are not compiled: over sliding windows, or offloaded
            self._room = self.cache.max_cache_len - self.cache.length
        return logits

    def step(self) -> torch.Tensor:
        """Feed the last tokens in a decode step; return their logits, as :meth:`prompt_logits` does."""
        logits = self._step(self.ids, self.kwargs)
        self._extend(self.kwargs, 1)
        return logits

    def record_steps(self, fuse: bool) -> None:
        """Repeat all further decode steps by a CUDA graph. Call it after the prompt, and :func:`check_recordable`."""
        self._steps = PassGraph(self.cache, self.model, fuse)

    def fuse_steps(self) -> None:
        """Make the products of all further decode steps, if they are of one row, by the kernel for that.

        Raises
        ------
        ValueError
            Steps are not compiled.
        """
        if not self.compiles:
            raise ValueError(
                "fuse=True needs decode steps that are compiled or recorded, and this call compiles none: give "
                "cuda_graph=True too, or leave it out"
            )
        self._fuses = True

    def check_room(self) -> None:
        """Raise ``ValueError`` if the cache is full before the answer is: a CUDA graph cannot tell."""
        room, needed = self.cache.max_cache_len - self.cache.length, self.remaining - 1
        if room < needed:
            raise ValueError(
                f"{needed} more tokens may be cached, but past_key_values has room for {room}, and a CUDA graph cannot "
                "tell that it is full: create a larger cache, or generate fewer tokens"
            )

    @property
    def fills_cache(self) -> bool:
        """Whether a cache with ``max_cache_len`` has no room for a further step."""
        return self._room is not None and self.generated > self._room

    def choose(self, raw: torch.Tensor) -> torch.Tensor:
        """Choose the next tokens by their logits, append and return them, [batch]."""
        scores = self.processors(self.ids, raw)
        return self._append(self._draw(scores), scores, raw)

    def trim_windows(self) -> None:
        """Drop the tokens that recording sliding windows hold beyond their size."""
        for layer in self.cache.layers:
            if layer.is_sliding and layer.record_past and layer.is_initialized:
                layer.crop(0)

    def release_windows(self) -> None:
        """Let sliding windows drop old tokens again, as before ``cache.activate_past_recording``."""
        self.trim_windows()
        for layer in self.cache.layers:
            if layer.is_sliding:
                layer.record_past = False

    def drop_last(self) -> None:
        """Remove the last tokens, and from the cache those that they followed."""
        self.ids, self.scores, self.logits = self.ids[:, :-1], self.scores[:-1], self.logits[:-1]
        self.cache.crop(-1)

    def output(self) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Return what ``generate()`` returns."""
        if not self.config.return_dict_in_generate:
            return self.ids
        return GenerateDecoderOnlyOutput(
            sequences=self.ids,
            scores=self.scores if self.config.output_scores else None,
            logits=self.logits if self.config.output_logits else None,
            **{CACHE: self.cache},
        )

    @property
    def _compiled(self) -> Any:
        """The compiled model."""
        return self.model.get_compiled_call(self.config.compile_config)

    def _step(self, ids: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """Feed the last token of each row in a decode step; return a float32 copy of its logits, [batch, vocabulary].

        Nothing else of the step's outputs is kept: the next replay of a CUDA graph overwrites them.
        """
        inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
        if self._steps is not None:
            return self.exact(self._steps(inputs)[:, -1])
        forward = self._compiled if self.compiles else self.model.__call__
        with ONE_ROW if self._fuses else nullcontext():
            return self.exact(forward(**inputs, return_dict=True).logits[:, -1])

    def _draw(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the next tokens by their scores, [batch]."""
        if self.config.do_sample:
            return torch.multinomial(scores.softmax(-1), 1)[:, 0]
        return scores.argmax(-1)

    def _append(self, chosen: torch.Tensor, scores: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        """Append a token to each row that goes on, and padding to the others; return them, [batch]."""
        chosen = self._padded(chosen, self.unfinished)
        self.ids = torch.cat((self.ids, chosen[:, None]), dim=1)
        if self.config.return_dict_in_generate and self.config.output_scores:
            self.scores += (scores,)
        if self.config.return_dict_in_generate and self.config.output_logits:
            self.logits += (raw,)
        self.unfinished = self.unfinished & ~self.criteria(self.ids, self.scores or None)
        return chosen

    def exact(self, logits: torch.Tensor) -> torch.Tensor:
        """Copy logits to float32, as ``generate()`` does."""
        return logits.to(copy=True, dtype=torch.float32, device=self.ids.device)

    def _padded(self, chosen: torch.Tensor, unfinished: torch.Tensor) -> torch.Tensor:
        return chosen if self.pad is None else torch.where(unfinished.bool(), chosen, self.pad)

    def _extend(self, kwargs: dict[str, Any], tokens: int) -> None:
        """Extend mask and positions among the arguments of the model."""
        if tokens:
            kwargs.update(self.model._update_model_kwargs_for_generation({}, kwargs, num_new_tokens=tokens))
