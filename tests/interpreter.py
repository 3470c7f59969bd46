"""Make Triton's interpreter faster: at every call of a device function it patches all of ``triton.language`` anew."""

import inspect
from types import FunctionType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_once_per_launch() -> None:
    """Let the calls of a launch share its patches, which change nothing once they are made.

    The launch still makes them at its beginning and takes them back at its end. Nothing is changed in versions of
    Triton whose interpreter is written otherwise.
    """
    names = ("GridExecutor", "InterpretedFunction", "_LangPatchScope", "_patch_lang")
    if not all(hasattr(interpreter, name) for name in names):
        return
    patch_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    languages: dict[int, tuple[dict[str, Any], frozenset[str]]] = {}  # by the globals that name them, which stay alive
    patched: set[frozenset[str]] = set()  # since the launch began

    def patch(fn: FunctionType) -> Any:
        if id(fn.__globals__) not in languages:
            modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
            found = frozenset(module.__name__ for module in modules if module in (tl, tl.core))
            languages[id(fn.__globals__)] = (fn.__globals__, found)
        found = languages[id(fn.__globals__)][1]
        if found in patched:
            return interpreter._LangPatchScope()
        patched.add(found)
        return patch_language(fn)

    def call(self: Any, *args: Any, **options: Any) -> None:
        patched.clear()
        try:
            launch(self, *args, **options)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch, call
