"""How ``generate()`` compiles decode steps in a measurement: Inductor's options, and guards on the model's modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CompileConfig

from eval.errors import EvalError

GRAPHS = "triton.cudagraphs"
"""The option that Transformers' own mode, ``"reduce-overhead"``, consists of."""


def check_options(options: Mapping[str, Any]) -> None:
    """Check options for Inductor, by their names in ``torch._inductor.list_options()``.

    Raises
    ------
    EvalError
        An option does not exist, or has a value of another type.
    """
    from torch._inductor import config

    known = config.get_config_copy()
    for name, value in options.items():
        if name not in known:
            raise EvalError(
                f"compile_options: {name!r} is unknown; known are those of torch._inductor.list_options(), such as "
                "coordinate_descent_tuning and max_autotune"
            )
        if known[name] is not None and type(value) is not type(known[name]):
            raise EvalError(
                f"compile_options: {name}={value!r} is not allowed: {type(known[name]).__name__}, got "
                f"{type(value).__name__}"
            )


def make_compile_config(
    options: Mapping[str, Any], *, module_guards: bool, on_cuda: bool, backend: str = "inductor"
) -> CompileConfig:
    """Create the settings of ``generate(compile_config=...)``.

    Parameters
    ----------
    options : mapping
        Options for Inductor beside those that Transformers' default consists of.
    module_guards : bool
        Whether compiled steps check that the model's modules are as they were.
    on_cuda : bool
        Whether the steps are recorded as CUDA graphs, as by default.
    backend : str
        Compiler of the graph.

    Returns
    -------
    transformers.CompileConfig
        One graph for the whole step.
    """
    chosen: dict[str, Any] = {GRAPHS: True} if on_cuda and backend == "inductor" else {}
    chosen.update(options)
    if not module_guards:
        chosen["guard_filter_fn"] = torch.compiler.skip_guard_on_all_nn_modules_unsafe
    return CompileConfig(backend=backend, mode=None, options=chosen or None, fullgraph=True)
