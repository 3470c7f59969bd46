"""The benchmarks' official prompts and lengths, fetched at a pinned commit and checked by SHA-256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eval.errors import EvalError
from eval.fetch import fetch_file, github_url
from eval.protocol_files import (
    read_babilong_upstream,
    read_gsm8k_upstream,
    read_infinitebench_packed,
    read_infinitebench_upstream,
    read_json_by_stem,
    read_longbench_v2_upstream,
    read_quest_upstream,
    read_ruler_upstream,
    read_scbench_upstream,
)
from hf_sparse_attn.cli.models import cache_dir

_Reader = Callable[[Sequence[Path]], dict[str, Any]]
# Raised by readers whose files are damaged, nested too deeply, or hold values of other types than the official ones.
_DAMAGED = (
    *(OSError, ValueError, SyntaxError, LookupError, TypeError, AttributeError),
    *(RecursionError, MemoryError, yaml.YAMLError),
)


@dataclass(frozen=True)
class Protocol:
    """A benchmark's official prompts and lengths."""

    name: str
    values: dict[str, Any]
    sha256: str
    """Hash of ``values`` (see ``values_sha256``), which does not depend on the format of the files."""
    origin: str
    """The files or the address that the values were read from."""


@dataclass(frozen=True)
class _Source:
    """The files of a protocol, and the hash of its values."""

    repository: str
    commit: str
    sha256: str
    upstream: tuple[str, ...]
    """Paths of the files in the repository."""
    packed: tuple[str, ...]
    """File names of the same values as plain JSON."""
    read_upstream: _Reader
    read_packed: _Reader


def load_protocol(name: str, protocol_dir: Path | None) -> Protocol:
    """Load a protocol and check it against its pinned hash.

    Parameters
    ----------
    name : str
        ``"longbench"``, ``"longbench_v2"``, ``"infinitebench"``, ``"ruler"``, ``"babilong"``, ``"scbench"``,
        ``"gsm8k"`` or ``"questpasskey"``.
    protocol_dir : Path, optional
        A folder with the values as JSON (``<name>/*.json``), or with the official files under their paths in the
        official repository, directly or in a subfolder ``<name>``. Default: the official files, fetched once into
        ``protocols/`` of the package's cache.

    Returns
    -------
    Protocol
        ``values`` has the keys ``dataset2prompt`` and ``dataset2maxlen`` (longbench), ``prompts`` with ``0shot`` and
        ``max_new_tokens`` (longbench_v2), ``prompts`` with ``templates``, ``max_new_tokens`` and ``truncation``
        (infinitebench), ``tasks`` and ``chat_templates`` (ruler), ``prompts`` (babilong, scbench), ``tasks`` (gsm8k),
        or ``passkey`` (questpasskey).

    Raises
    ------
    EvalError
        Unknown name; files that are missing, unreadable or cannot be fetched; or another hash than the pinned one.
    """
    if name not in _SOURCES:
        raise EvalError(f"protocol {name!r} is unknown; known: {', '.join(_SOURCES)}")
    source = _SOURCES[name]
    if protocol_dir is None:
        files, read = _fetch(name, source), source.read_upstream
        origin = f"https://github.com/{source.repository}/tree/{source.commit}"
    else:
        files, read = _find(name, source, protocol_dir)
        origin = ", ".join(str(file) for file in files)
    listing = ", ".join(str(file) for file in files)
    try:
        values = read(files)
        digest = values_sha256(values)
    except _DAMAGED as error:
        raise EvalError(f"protocol {name!r} cannot be read from {listing}: {type(error).__name__}: {error}") from error
    if digest != source.sha256:
        raise EvalError(
            f"protocol {name!r} from {listing} has sha256 {digest}, but {source.repository} at {source.commit} has "
            f"{source.sha256}; results would not be comparable (delete a cached copy to fetch it again)"
        )
    return Protocol(name=name, values=values, sha256=digest, origin=origin)


def values_sha256(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of values as canonical JSON: sorted keys, no spaces, UTF-8 without escapes."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _find(name: str, source: _Source, protocol_dir: Path) -> tuple[list[Path], _Reader]:
    places = []
    for names, read in ((source.packed, source.read_packed), (source.upstream, source.read_upstream)):
        for folder in (protocol_dir / name, protocol_dir):
            files = [folder / file for file in names]
            if all(file.is_file() for file in files):
                return files, read
            places.append(f"{folder} ({', '.join(names)})")
    raise EvalError(
        f"protocol {name!r} is not complete in --protocol-dir {protocol_dir}; looked for all of one of: "
        f"{'; '.join(places)}. The official files are in https://github.com/{source.repository} at {source.commit}"
    )


def _fetch(name: str, source: _Source) -> list[Path]:
    folder = cache_dir() / "protocols" / name / source.commit
    # The files' hashes are not checked: those of the values are, at every load.
    return [
        fetch_file(
            f"protocol {name!r}",
            github_url(source.repository, source.commit, path),
            folder / path,
            "name a folder that has it with --protocol-dir",
        )
        for path in source.upstream
    ]


# sha256 is values_sha256 of the protocol's values. The JSON layout has one key per file, the file's stem, and only the
# name of InfiniteBench's "truncation". Both layouts have equal values and so the same hash.
_SOURCES: dict[str, _Source] = {
    "longbench": _Source(
        repository="THUDM/LongBench",
        commit="2e00731f8d0bff23dc4325161044d0ed8af94c1e",
        sha256="64dc4c7f191ab317076cca87d7db354c17e50c6457e9176e0fbfd5cc16305d27",
        upstream=("LongBench/config/dataset2prompt.json", "LongBench/config/dataset2maxlen.json"),
        packed=("dataset2prompt.json", "dataset2maxlen.json"),
        read_upstream=read_json_by_stem,
        read_packed=read_json_by_stem,
    ),
    "longbench_v2": _Source(
        repository="THUDM/LongBench",
        commit="2e00731f8d0bff23dc4325161044d0ed8af94c1e",
        sha256="c3b9ed599a860cb838b1da1762727ed98df1f671fe9edbfd029f84e73f0b2abe",
        upstream=("prompts/0shot.txt", "pred.py"),
        packed=("prompts.json",),
        read_upstream=read_longbench_v2_upstream,
        read_packed=read_json_by_stem,
    ),
    "infinitebench": _Source(
        repository="OpenBMB/InfiniteBench",
        commit="88b3daa6989da2fbe0077170d7a3c84c25d5ae58",
        sha256="f644fe55cef9a3d4f6bf863f49d159671bd1bf0f653da2d1a8741d2d2bf5f7f6",
        upstream=("src/prompt.py", "src/eval_utils.py"),
        packed=("prompts.json",),
        read_upstream=read_infinitebench_upstream,
        read_packed=read_infinitebench_packed,
    ),
    "ruler": _Source(
        repository="NVIDIA/RULER",
        commit="c3f5e3b4f87f97e048793bb510a3a6b19a46bf3a",
        sha256="547da7248cc3f90248ea71e0097b53185c0da6f942763091edc257e7414e5b41",
        upstream=("scripts/data/synthetic/constants.py", "scripts/synthetic.yaml", "scripts/data/template.py"),
        packed=("tasks.json", "chat_templates.json"),
        read_upstream=read_ruler_upstream,
        read_packed=read_json_by_stem,
    ),
    "babilong": _Source(
        repository="booydar/babilong",
        commit="7a6efee29f5cac03c3c410e6799c80fd2ffe3610",
        sha256="6bd8e1c2f07158ee3d49ff454f77993d206d69a70316a6f239c789de0532deb6",
        upstream=("babilong/prompts.py", "babilong/metrics.py", "scripts/run_model_on_babilong.py"),
        packed=("prompts.json",),
        read_upstream=read_babilong_upstream,
        read_packed=read_json_by_stem,
    ),
    "scbench": _Source(
        repository="microsoft/MInference",
        commit="fb56c917f618e8645f1cfc37535afd7424d78f0d",
        sha256="d4e5ae186ddadfb56de359148f42de64db61762bf017a78fcf85686ce98ab7d3",
        upstream=("scbench/eval_utils.py",),
        packed=("prompts.json",),
        read_upstream=read_scbench_upstream,
        read_packed=read_json_by_stem,
    ),
    "gsm8k": _Source(
        repository="EleutherAI/lm-evaluation-harness",
        commit="4e7e0d47f33bc71070c1d38394bafbb52b117163",
        sha256="da80c30c2dd8fa114eaa7523ee3637db5d90e8e2d6f0cc71dce4bc75f9f9bb0d",
        upstream=("lm_eval/tasks/gsm8k/gsm8k-cot.yaml", "lm_eval/tasks/gsm8k/gsm8k-cot-zeroshot.yaml"),
        packed=("tasks.json",),
        read_upstream=read_gsm8k_upstream,
        read_packed=read_json_by_stem,
    ),
    "questpasskey": _Source(
        repository="mit-han-lab/Quest",
        commit="01c1623bf9395009520874e989e29f683203b357",
        sha256="64f2a83f978e3086c2569c32dfdb6413af9acf051f873d7ef9cdce67eacb10d1",
        upstream=("evaluation/passkey/passkey.py",),
        packed=("passkey.json",),
        read_upstream=read_quest_upstream,
        read_packed=read_json_by_stem,
    ),
}


class _Attachment:
    """Replaces ``{file:{context}}``, in templates of services that upload files, by the text itself."""

    def __format__(self, text: str) -> str:
        return text


def render_prompt(template: str, context: str, **fields: Any) -> tuple[str, int]:
    """Fill an official template, and measure the text after the context.

    Parameters
    ----------
    template : str
        A template for ``str.format``; its field ``context`` is the context (``document`` or ``fcontext`` in some of
        InfiniteBench's).
    context : str
        The material. Braces in it are kept.
    **fields
        The template's other fields.

    Returns
    -------
    text : str
        The result of ``template.format``.
    question_chars : int
        Number of its last characters that follow the context.
    """
    # Located before the context is inserted, so the context may contain anything.
    mark = "\0context\0"
    shell = template.format(context=mark, document=mark, fcontext=mark, file=_Attachment(), **fields)
    head, _, question = shell.rpartition(mark)
    return head + context + question, len(question)
