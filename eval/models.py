"""The models of a sweep's runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from eval.config import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from eval.processes import Processes


class Models:
    """Load each model once for a sweep's runs; other processes wait while the first one fetches weights."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._described: dict[str, tuple[PreTrainedTokenizerBase, PreTrainedConfig]] = {}
        self._key: tuple[str, str | None, str | None] | None = None
        self._model: PreTrainedModel | None = None

    def describe(self, config: RunConfig) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig]:
        """Return the model's tokenizer and configuration."""
        from transformers.utils import logging

        from hf_sparse_attn.cli.loading import announce_download
        from hf_sparse_attn.cli.models import load_tokenizer
        from hf_sparse_attn.cli.progress import hidden_bars

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        if config.model not in self._described:
            if self._processes.is_main:
                announce_download(config.model)
            with self._main_process_first(), hidden_bars():
                self._described[config.model] = load_tokenizer(config.model)
        return self._described[config.model]

    def load(self, config: RunConfig) -> PreTrainedModel:
        """Return the model; the last one is kept."""
        import torch

        from hf_sparse_attn.cli.models import load_model
        from hf_sparse_attn.cli.progress import hidden_bars

        key = (config.model, config.dtype, config.device)
        if self._model is None or key != self._key:
            self._model = None  # frees memory first, because two models may not fit
            device = config.device
            if device is None and self._processes.world_size > 1 and torch.cuda.is_available():
                device = f"cuda:{self._processes.local_rank % torch.cuda.device_count()}"
            dtype = getattr(torch, config.dtype) if config.dtype else None
            with hidden_bars():
                self._model, _ = load_model(config.model, dtype, device)
            self._key = key
        return self._model

    @contextmanager
    def _main_process_first(self) -> Iterator[None]:
        if not self._processes.is_main:
            self._processes.wait()
        yield
        if self._processes.is_main:
            self._processes.wait()
