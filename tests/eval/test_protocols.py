"""Protocols: both file formats, the pinned hashes, and the errors of failed downloads."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from pprint import pformat
from typing import Any

import pooch
import pytest
import requests
import yaml

from eval.errors import EvalError
from eval.protocols import _SOURCES, load_protocol, render_prompt, values_sha256
from tests.eval.own_protocols import FIGURES

NAMES = ("longbench", "infinitebench", "ruler", "questpasskey", "longbench_v2", "babilong", "gsm8k", "scbench")


def write_upstream(folder: Path, name: str, values: dict[str, Any]) -> list[Path]:
    """Write values as files in the formats of the official repositories."""
    if name == "longbench":
        texts = [json.dumps(values[key], indent=4, ensure_ascii=True) for key in ("dataset2prompt", "dataset2maxlen")]
    elif name == "infinitebench":
        prompts = values["prompts"]
        sets = {**prompts["templates"], "rwkv_templates": {"passkey": "{prompt} {context}"}}
        code = "".join(f"{key} = {joined_dict(templates)}\n\n" for key, templates in sets.items())
        manner = prompts["truncation"]
        utilities = (
            "import not_installed\nfrom prompt import *\n\n"
            f"DATA_NAME_TO_MAX_NEW_TOKENS = {pformat(prompts['max_new_tokens'])}\n\n"
            f"def truncate_input(input, max_length, manner={manner!r}):\n    return input[:max_length]\n"
        )
        texts = [code, utilities]
    elif name == "longbench_v2":
        prompts = values["prompts"]
        signature = f"prompt, model, temperature=0.5, max_new_tokens={prompts['max_new_tokens']}, stop=None"
        texts = [prompts["0shot"], f"import openai\n\ndef query_llm({signature}):\n    return ''\n"]
    elif name == "babilong":
        prompts = values["prompts"]
        head, middle, tail = prompts["template"].partition("\n[\n")
        texts = [
            f"TASK_TEMPLATE = {head!r}\nUSER_TEMPLATE = {middle + tail!r}\n"
            "DEFAULT_TEMPLATE = f'{TASK_TEMPLATE}{USER_TEMPLATE}'\n"
            f"DEFAULT_PROMPTS = {pformat(prompts['tasks'])}\n",
            f"TASK_LABELS = {pformat(prompts['labels'])}\n",
            "def main(model):\n    generate_kwargs = {'num_beams': 1, "
            f"'max_new_tokens': {prompts['max_new_tokens']}, 'pad': model.pad}}\n",
        ]
    elif name == "gsm8k":
        tasks = {task: dict(each) for task, each in values["tasks"].items()}
        shots = {task: each.pop("shots") for task, each in tasks.items()}
        official = [
            {"task": task, "dataset_path": "somewhere", **each}
            | ({"fewshot_config": {"sampler": "first_n", "samples": shots[task]}} if shots[task] else {})
            for task, each in tasks.items()
        ]
        texts = [yaml.safe_dump(each) for each in official]
    elif name == "scbench":
        prompts = values["prompts"]
        requests = {task: tuple(each) if isinstance(each, list) else each for task, each in prompts["requests"].items()}
        asked = prompts["asked_number"]
        texts = [
            f"import torch\n\nDATA_NAME_TO_MAX_NEW_TOKENS = {pformat(prompts['max_new_tokens'])}\n"
            f"multiturn_templates = {pformat(prompts['first_turn'])}\n"
            f"multiturn_templates_scdq = {pformat(requests)}\n"
            f"multiturn_follow_up_templates = {pformat(prompts['follow_up'])}\n"
            f"multiturn_follow_up_templates_in_chat_tempate = {pformat(prompts['in_chat'])}\n\n"
            f"def create_multiturn_prompt(eg, tok):\n    prefix = f{asked!r}\n"
            f"    for i in eg:\n        prefix = f{asked!r}\n"
            f"    return [tok(i).replace('', '') + {prompts['summary_start']!r} for i in eg]\n"
        ]
    elif name == "questpasskey":
        wording = values["passkey"]
        plain = {key: text for key, text in wording.items() if key not in ("information_line", "question_chars")}
        lines = [f"    {key} = {text!r}\n" for key, text in plain.items()]
        line = f"    information_line = (\n        f{wording['information_line']!r}\n    )\n"
        texts = [
            f"def generate_prompt(n, depth):\n{''.join(lines)}    pass_key = 1\n{line}    return pass_key\n\n"
            f"def test_model(pipe, text):\n    length = len(text)\n    q_length = {wording['question_chars']}\n"
        ]
    else:
        unused = {"qaiah": {"tokens_to_generate": 1, "template": "{context}", "answer_prefix": ""}}
        texts = [
            f'"""How to add a task."""\n\nTASKS = {pformat({**values["tasks"]["templates"], **unused})}\n',
            "# a comment\n" + yaml.safe_dump(values["tasks"]["tasks"], sort_keys=False),
            f"Templates = {pformat(values['chat_templates'])}\n",
        ]
    files = [folder / path for path in _SOURCES[name].upstream]
    for file, text in zip(files, texts, strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return files


def joined_dict(strings: dict[str, str]) -> str:
    """Source of a dict with each value in two parts, joined with ``+``, and comments between."""
    lines = [
        f"    {key!r}: {text[:9]!r} + {text[9:]!r},  # noqa\n    # {key!r}: None,\n" for key, text in strings.items()
    ]
    return "{\n" + "".join(lines) + "}"


@pytest.mark.parametrize("name", NAMES)
def test_both_formats_have_the_same_values_and_the_pinned_hash(name: str, protocols: Path, tmp_path: Path) -> None:
    from_json = load_protocol(name, protocols)
    files = write_upstream(tmp_path / "official", name, from_json.values)
    from_official = load_protocol(name, tmp_path / "official")
    assert from_official.values == from_json.values
    assert from_official.sha256 == from_json.sha256 == values_sha256(from_json.values) == _SOURCES[name].sha256
    assert all(str(file) in from_official.origin for file in files)


def test_values_have_the_agreed_shape(protocols: Path) -> None:
    longbench, infinitebench, ruler, *_ = (load_protocol(name, protocols).values for name in NAMES)
    assert set(longbench["dataset2prompt"]) == set(longbench["dataset2maxlen"])
    assert infinitebench["prompts"]["truncation"] == "middle"
    assert set(infinitebench["prompts"]["templates"]["kimi_templates"]) == set(
        infinitebench["prompts"]["max_new_tokens"]
    )
    assert {task["task"] for task in ruler["tasks"]["tasks"].values()} == set(ruler["tasks"]["templates"])
    assert ruler["chat_templates"]["base"] == "{task_template}"
    assert ruler["tasks"]["tasks"] == FIGURES["ruler"]["tasks"]
    for task, parts in FIGURES["ruler"]["fields"].items():
        for part, fields in parts.items():
            named = re.findall(r"\{\w+\}", ruler["tasks"]["templates"][task][part])
            assert set(named) == set(fields), (task, part)


def test_folder_may_be_the_protocols_own(protocols: Path) -> None:
    assert load_protocol("ruler", protocols / "ruler").sha256 == load_protocol("ruler", protocols).sha256


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_value_is_refused_with_both_hashes(name: str, protocols: Path, tmp_path: Path) -> None:
    values = copy.deepcopy(load_protocol(name, protocols).values)
    if name == "longbench":
        values["dataset2maxlen"]["trec"] += 1
    elif name == "infinitebench":
        values["prompts"]["truncation"] = "left"
    elif name == "scbench":
        values["prompts"]["summary_start"] += " that"
    elif name in ("longbench_v2", "babilong"):
        values["prompts"]["max_new_tokens"] += 1
    elif name == "gsm8k":
        values["tasks"]["gsm8k_cot"]["num_fewshot"] += 1
    elif name == "questpasskey":
        values["passkey"]["question_chars"] += 1
    else:
        values["tasks"]["tasks"]["vt"]["args"]["num_hops"] += 1
    files = write_upstream(tmp_path, name, values)
    with pytest.raises(EvalError) as caught:
        load_protocol(name, tmp_path)
    message = str(caught.value)
    assert values_sha256(values) in message
    assert _SOURCES[name].sha256 in message
    assert all(str(file) in message for file in files)


def test_code_in_official_files_is_not_run(protocols: Path, tmp_path: Path) -> None:
    write_upstream(tmp_path, "infinitebench", load_protocol("infinitebench", protocols).values)
    prompts = tmp_path / "src/prompt.py"
    prompts.write_text(prompts.read_text(encoding="utf-8") + f"\nopen({str(tmp_path / 'ran')!r}, 'w')\n", "utf-8")
    load_protocol("infinitebench", tmp_path)
    prompts.write_text("gpt4_templates = dict(passkey=print('ran'))\n", encoding="utf-8")
    with pytest.raises(EvalError, match=r"prompt\.py.*ValueError"):
        load_protocol("infinitebench", tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", NAMES)
def test_missing_files_are_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="--protocol-dir") as caught:
        load_protocol(name, tmp_path)
    for file in (*_SOURCES[name].packed, *_SOURCES[name].upstream):
        assert file in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    ["{", "[]", '{"narrativeqa": "\\ud8', '{"narrativeqa": "\\ud800"}', pytest.param("[" * 100_000, id="too deep")],
)
def test_damaged_files_are_named(damage: str, protocols: Path, tmp_path: Path) -> None:
    (tmp_path / "dataset2prompt.json").write_text(damage, encoding="utf-8")
    (tmp_path / "dataset2maxlen.json").write_text("{}", encoding="utf-8")
    with pytest.raises(EvalError, match=r"dataset2prompt\.json"):
        load_protocol("longbench", tmp_path)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("infinitebench", {"prompts.json": '{"truncation": 3}'}),
        ("ruler", dict(zip(_SOURCES["ruler"].upstream, ("TASKS = {}", "[1]", "Templates = {}"), strict=True))),
        (
            "infinitebench",
            dict.fromkeys(_SOURCES["infinitebench"].upstream, f"gpt4_templates = {'+'.join('1' * 9999)}"),
        ),
    ],
    ids=["a number for a text", "a list for a mapping", "nested too deeply"],
)
def test_files_with_values_of_other_kinds_are_named(name: str, files: dict[str, str], tmp_path: Path) -> None:
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    with pytest.raises(EvalError, match=f"protocol '{name}' cannot be read from .*{re.escape(next(iter(files)))}"):
        load_protocol(name, tmp_path)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(EvalError, match="'helm' is unknown; known: longbench, longbench_v2, infinitebench, ruler"):
        load_protocol("helm", None)


@pytest.mark.parametrize("name", NAMES)
def test_offline_nothing_is_tried(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_SPARSE_ATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(pooch, "retrieve", lambda *args, **kwargs: pytest.fail("the network was tried"))
    with pytest.raises(EvalError, match="--protocol-dir") as caught:
        load_protocol(name, None)
    assert f"https://raw.githubusercontent.com/{_SOURCES[name].repository}/" in str(caught.value)
    assert str(tmp_path / "protocols" / name) in str(caught.value)
    assert "HF_HUB_OFFLINE" in str(caught.value)


def test_an_unreachable_host_is_reported_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_SPARSE_ATTN_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    for variable in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # the discard port: nobody listens
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "")
    with pytest.raises(EvalError, match=r"dataset2prompt\.json cannot be fetched.*--protocol-dir"):
        load_protocol("longbench", None)


@pytest.fixture
def official_host(protocols: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Replaces the host of the official files; returns the requested addresses."""
    monkeypatch.setenv("HF_SPARSE_ATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE")

    def serve(name: str) -> list[str]:
        source, asked = _SOURCES[name], []
        write_upstream(tmp_path / "host", name, load_protocol(name, protocols).values)

        def get(url: str, **options: Any) -> requests.Response:
            asked.append(url)
            assert max(options["timeout"]) <= 10
            prefix = f"https://raw.githubusercontent.com/{source.repository}/{source.commit}/"
            response = requests.Response()
            response.status_code = 200
            response.raw = (tmp_path / "host" / url.removeprefix(prefix)).open("rb")
            return response

        monkeypatch.setattr(requests, "get", get)
        return asked

    return serve


@pytest.mark.parametrize("name", NAMES)
def test_fetched_once_and_checked_at_each_load(name: str, official_host: Callable[[str], list[str]]) -> None:
    asked = official_host(name)
    first = load_protocol(name, None)
    assert len(asked) == len(_SOURCES[name].upstream)
    assert first.sha256 == _SOURCES[name].sha256
    assert _SOURCES[name].commit in first.origin
    assert load_protocol(name, None) == first
    assert len(asked) == len(_SOURCES[name].upstream)


def test_a_damaged_cached_copy_is_refused(official_host: Callable[[str], list[str]], tmp_path: Path) -> None:
    official_host("longbench")
    load_protocol("longbench", None)
    cached = next((tmp_path / "cache").rglob("dataset2maxlen.json"))
    cached.write_text("{}", encoding="utf-8")
    with pytest.raises(EvalError) as caught:
        load_protocol("longbench", None)
    assert str(cached) in str(caught.value)
    assert _SOURCES["longbench"].sha256 in str(caught.value)


@pytest.mark.parametrize(
    ("template", "fields", "question"),
    [
        ("Read. {context} Q: {input} A:", {"input": "why {context}?"}, " Q: why {context}? A:"),
        ("{context}", {}, ""),
        ("Question: {question}{file:{context}}", {"question": "q"}, ""),
        ("{fcontext} end", {}, " end"),
    ],
)
def test_render_prompt_is_str_format_and_measures_the_question(
    template: str, fields: dict[str, str], question: str
) -> None:
    context = 'braces {0} {context} \0 {"json": [1]}'
    text, question_chars = render_prompt(template, context, **fields)
    assert text[len(text) - question_chars :] == question
    if "file" not in template:
        assert text == template.format(context=context, fcontext=context, **fields)
    assert context in text
