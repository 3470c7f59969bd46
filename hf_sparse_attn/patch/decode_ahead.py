"""Decode without waiting for the device: the next step is launched before the host knows whether the text has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hf_sparse_attn.cache.cache import SparseCache
from hf_sparse_attn.cache_argument import CACHE
from hf_sparse_attn.patch.answer import Answer, check_call
from hf_sparse_attn.patch.pass_graph import check_loop, check_recordable
from hf_sparse_attn.patched import patched_method

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
    from transformers.generation import GenerateDecoderOnlyOutput
    from transformers.generation.streamers import BaseStreamer


class DecodeAhead:
    """A loop for ``generate()`` in which the host runs one step ahead of the device.

    Pass it to ``generate()`` as ``custom_generate``. After each step ``generate()`` waits for the device, to learn
    whether the text has ended; only then does it prepare and launch the next step, while the device is idle. This loop
    launches the next step first, and learns of the end one step late. It pays where steps are compiled: the host's part
    of a token is then shorter than the device's, and hidden behind it.

    The tokens are those of ``generate()``, sampled ones too if the random state is the same. The surplus step of a text
    that ends before its maximum length leaves no trace in tokens, scores and cache; :func:`sparse_attention_stats`
    counts what it read, and if tokens are sampled, it draws once more. Stopping criteria and logits processors are
    called once more than by ``generate()``.

    Parameters
    ----------
    streamer
        Receives each token, one step late. ``generate()`` does not hand its own ``streamer`` to a ``custom_generate``:
        give it here instead.
    cuda_graph
        Record the decode step as a CUDA graph instead of compiling it, anew in each call of ``generate()``. So no call
        waits for a compiler, but the model's small kernels are not fused. Needs a static cache on one CUDA device, as
        patched models have there by default.
    fuse
        Make products with the single row of a batch of one by :func:`hf_sparse_attn_kernels.one_row_linear`. With
        ``cuda_graph``, also compile the model's norms and its RoPE, each once for all layers: each is then one kernel,
        not ten, and rounds as in compiled steps. The first call of a process waits some seconds for the compiler. Under
        tensor parallelism, small sums over the GPUs of one machine are made by one kernel that reads their memory.

    Examples
    --------
    >>> patch_model(model, "quest", token_budget=1024)
    >>> model.generate(**inputs, max_new_tokens=100, custom_generate=DecodeAhead())
    """

    def __init__(self, streamer: BaseStreamer | None = None, *, cuda_graph: bool = False, fuse: bool = False) -> None:
        check_loop(streamer, cuda_graph, fuse)
        self.streamer, self.cuda_graph, self.fuse = streamer, cuda_graph, fuse

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Generate, called by ``generate()``.

        Returns
        -------
        GenerateDecoderOnlyOutput or torch.Tensor
            As ``generate()`` returns without ``custom_generate``.

        Raises
        ------
        ValueError
            The model is not patched, its method evicts tokens, or the generation mode or an output is not supported.
            With ``cuda_graph``: the model or its cache is not on one CUDA device, or the cache is not static or too
            small. With ``fuse`` alone: steps are not compiled.
        """
        method = patched_method(model)
        check_call("DecodeAhead", model, generation_config)
        cache = model_kwargs.get(CACHE)
        if not isinstance(cache, SparseCache):
            raise ValueError(f"use_cache must be True for DecodeAhead, got {model_kwargs.get('use_cache')}")
        if method.evicts:
            raise ValueError(
                f"method {method.name!r} does not support DecodeAhead: it evicts tokens, so that the cache cannot take "
                "back a step behind the end"
            )
        if self.cuda_graph:
            check_recordable(model, input_ids.device, cache)
        answer = Answer(model, cache, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        if self.fuse and not self.cuda_graph:
            answer.fuse_steps()
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        try:
            _generate(answer, self.streamer, self.cuda_graph, self.fuse)
        finally:
            answer.release_windows()
        if self.streamer is not None:
            self.streamer.end()
        return answer.output()


def _generate(answer: Answer, streamer: BaseStreamer | None, cuda_graph: bool, fuse: bool) -> None:
    """Generate until all rows are finished.

    While the device works on step i, the host waits for the tokens of step i - 1 and then launches step i + 1.
    """
    arrivals = Arrival(answer.ids), Arrival(answer.ids)
    logits = answer.prompt_logits()
    if cuda_graph:
        answer.check_room()
        answer.record_steps(fuse)
    answer.cache.activate_past_recording()  # a surplus step must not push tokens out of sliding windows
    with answer.model._optimize_model_for_decode():
        while True:
            chosen = answer.choose(logits)
            arriving, before = arrivals[answer.generated % 2], arrivals[(answer.generated - 1) % 2]
            arriving.send(chosen, answer.unfinished)
            if answer.generated > 1:
                before.wait()
                if streamer is not None:
                    streamer.put(before.tokens.clone())
                if before.ends_all:
                    answer.drop_last()
                    return
            if answer.is_full:
                if streamer is not None:
                    arriving.wait()
                    streamer.put(arriving.tokens.clone())
                return
            if answer.fills_cache or answer.cache.shared.prompt_is_open:  # the next step must not be surplus
                arriving.wait()
                if arriving.ends_all:
                    if streamer is not None:
                        streamer.put(arriving.tokens.clone())
                    return
            answer.trim_windows()
            logits = answer.step()


class Arrival:
    """A step's tokens on their way to the host, and whether they end all rows.

    Parameters
    ----------
    ids
        Tokens [batch, length], for the batch size, dtype and device.
    """

    def __init__(self, ids: torch.Tensor) -> None:
        is_cuda = ids.is_cuda
        self.tokens = torch.zeros(len(ids), dtype=ids.dtype, pin_memory=is_cuda)
        """[batch], once :meth:`wait` has returned."""
        self._ends_all = torch.zeros((), dtype=torch.bool, pin_memory=is_cuda)
        self._sent = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        self._device = ids.device

    def send(self, tokens: torch.Tensor, unfinished: torch.Tensor) -> None:
        """Copy the tokens, and whether no row of ``unfinished`` goes on, without waiting for them on CUDA."""
        self.tokens.copy_(tokens, non_blocking=True)
        self._ends_all.copy_(unfinished.max() == 0, non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Wait until what was sent last has arrived."""
        if self._sent is not None:
            self._sent.synchronize()

    @property
    def ends_all(self) -> bool:
        """Whether the tokens end all rows."""
        return bool(self._ends_all)
