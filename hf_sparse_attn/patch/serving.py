"""Serve a patched model with Transformers' own server, the one behind ``transformers serve``.

That server loads models by name. Here it is given one that is already loaded and patched, and nothing else:

- ``Serve`` builds the server, and a ``ModelManager`` from which every endpoint gets its model.
- ``ModelManager.force_model`` makes it refuse requests for other names.
- An instance-level ``load_model_and_processor`` returns the patched model. Without it, ``POST /reset`` would unload the
  model, and the next request would load it again by its name, unpatched.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hf_sparse_attn.patch.generation import NO_PAGED_CACHE
from hf_sparse_attn.patched import base_model, get_patch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SERVER_OPTIONS = (
    "host",
    "port",
    "compile",
    "reasoning",
    "chat_template_kwargs",
    "enable_cors",
    "log_level",
    "default_seed",
)
"""Options of ``transformers serve`` that do not choose, load or unload models."""


def serve_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str | None = None, **options: Any
) -> None:
    """Answer HTTP requests with a patched model until the process is interrupted.

    The server is that of ``transformers serve``, with its endpoints: ``/v1/chat/completions``, ``/v1/completions``,
    ``/v1/responses``, ``/v1/models``, ``/health``. It needs ``pip install 'transformers[serving]'``. Requests are
    answered one after the other, each by a call of ``generate()``.

    Parameters
    ----------
    model
        A patched model.
    tokenizer
        Its tokenizer, a fast one. Chats need its chat template.
    name
        The name that requests give as ``model``; they may also leave it out. Default: the name or path that the model
        was loaded from.
    options
        Options of ``transformers serve``: ``host`` (``"localhost"``), ``port`` (8000), ``compile``, ``reasoning``,
        ``chat_template_kwargs``, ``enable_cors``, ``log_level``, ``default_seed``.

    Raises
    ------
    ImportError
        The packages of the server are not installed.
    TypeError
        An option is unknown, or about loading models.
    ValueError
        The model is not patched, it has no name, or ``continuous_batching=True``.

    Examples
    --------
    >>> patch_model(model, "quest", token_budget=1024)
    >>> serve_model(model, tokenizer, "qwen", port=8000)
    """
    get_patch(model)  # raises for an unpatched model
    check_options(options)
    name = name or base_model(model).name_or_path
    if not name:
        raise ValueError("name is empty, and the model was not loaded from anywhere: give the name to serve it under")
    check_packages()

    from transformers.cli.serve import Serve

    class PreparedServer(Serve):  # type: ignore[misc]
        """The server, built but not yet running."""

        def start_server(self) -> None:
            """Leave the start to the caller; ``non_blocking`` calls this at the end of the constructor."""

    prepared = PreparedServer(non_blocking=True, **options)
    serve_only(prepared._model_manager, model, tokenizer, name)
    prepared.server.run()


def check_options(options: dict[str, Any]) -> None:
    """Raise if one of the options of :func:`serve_model` is not allowed."""
    if options.get("continuous_batching"):
        raise ValueError(NO_PAGED_CACHE)
    for option in options:
        if option not in SERVER_OPTIONS:
            raise TypeError(f"serve_model() takes no option {option!r}; allowed: {', '.join(SERVER_OPTIONS)}")


def check_packages() -> None:
    """Raise ``ImportError`` if the packages of Transformers' server are not installed."""
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise ImportError(
            "serving needs fastapi, uvicorn, openai and pydantic, which are not all installed: "
            "pip install 'transformers[serving]'"
        )


def serve_only(manager: Any, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Make a server's ``ModelManager`` serve one model, under one name, for as long as it lives."""

    def load(
        model_id_and_revision: str,
        progress_callback: Callable[[dict[str, Any]], None] | None = None,
        tqdm_class: type | None = None,
        gguf_file: str | None = None,
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        asked = model_id_and_revision.removesuffix("@main") + (f":{gguf_file}" if gguf_file else "")
        if asked != name.removesuffix("@main"):
            raise ValueError(f"this server serves {name!r} alone; model={asked!r} is not loaded")
        get_patch(model)  # never answer densely if it was unpatched in the meantime
        if progress_callback is not None:
            progress_callback({"status": "ready", "model": name, "cached": True})
        return model, tokenizer

    listed = [{"owned_by": "", "id": name, "object": "model", "created": int(time.time())}]
    manager.force_model = name
    manager.load_model_and_processor = load
    manager.get_gen_models = lambda: listed
