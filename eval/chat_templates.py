"""Chat templates for models whose tokenizer has none: a Jinja file, or one of RULER's own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from eval.errors import EvalError
from eval.prompts import in_chat_template
from eval.protocols import load_protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RULER_PREFIX = "ruler:"
_PROBE = 'a message of <two> "lines":\nthis & that'  # as it is in the prompt, unless a template escapes it


def read_chat_template(given: str, protocol_dir: Path | None) -> str:
    """Return a chat template in Jinja.

    Parameters
    ----------
    given : str
        A file in UTF-8, or ``ruler:NAME``, the name of a template in RULER's pinned file, such as
        ``ruler:vicuna-chat``. It becomes the tokenizer's first token, and the message in RULER's words.
    protocol_dir : Path, optional
        Folder of the protocols, as for ``load_protocol``.

    Raises
    ------
    EvalError
        The file cannot be read, or RULER has no such template.
    """
    if not given.startswith(RULER_PREFIX):
        try:
            return Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise EvalError(f"chat_template={given!r} cannot be read: {error}") from error
    known = load_protocol("ruler", protocol_dir).values["chat_templates"]
    name = given.removeprefix(RULER_PREFIX)
    if name not in known:
        names = ", ".join(RULER_PREFIX + each for each in known)
        raise EvalError(f"chat_template={given!r} is unknown; RULER has {names}")
    before, _, after = known[name].partition("{task_template}")
    return f"{{{{ bos_token }}}}{_literal(before)}{{{{ messages[0]['content'] }}}}{_literal(after)}"


def with_chat_template(tokenizer: PreTrainedTokenizerBase, template: str, given: str) -> PreTrainedTokenizerBase:
    """Return a copy of a tokenizer with a chat template.

    Raises
    ------
    EvalError
        The template cannot be used: it does not hold the message. The error calls it ``given``.
    """
    own = copy.copy(tokenizer)
    own.chat_template = template
    try:
        holds_message = _PROBE in in_chat_template(own, _PROBE)
    except (TemplateError, TypeError, ValueError, LookupError) as error:
        raise EvalError(f"chat_template={given!r} cannot be used: {type(error).__name__}: {error}") from error
    if not holds_message:
        raise EvalError(f"chat_template={given!r} cannot be used: it leaves out the message, or changes it")
    return own


def _literal(text: str) -> str:
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""
