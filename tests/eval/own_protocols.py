"""Protocols with the official structure and our own wording, and the pins with which the loader accepts them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.protocols import _SOURCES, values_sha256
from tests.eval.ruler_data import make_protocol

GOLDEN = Path(__file__).parent / "golden"
FIGURES: dict[str, Any] = json.loads((GOLDEN / "protocols.json").read_text(encoding="utf-8"))
"""The official protocols without their wording: tasks, tokens to generate, settings, and the templates' fields."""

PASSKEY_WORDING = {
    "task_description": "A number hides below. Keep it in mind; a question about it follows at the end of the text.",
    "garbage": "Rain falls. Snow melts. Rivers run. So it goes, and so it went.",
    "information_line": "The number hidden here is {pass_key}. Keep it. {pass_key} is the number.",
    "final_question": "Which number is hidden here? The number is",
}
V2_WORDING = "Read.\n\n$DOC$\n\nNow say: $Q$\nA is $C_A$.\nB is $C_B$.\nC is $C_C$.\nD is $C_D$.\n\nName one."
BABILONG_WORDING: dict[str, Any] = {
    "template": "{instruction}\n{examples}\n{post_prompt}\n[\n{context}\n]\n\nAsked: {question}",
    "tasks": {
        f"qa{number}": {
            "instruction": f"Facts of kind {number} hide below.",
            "examples": "One: a dog is here. Who is here?\nSaid: dog",
            "post_prompt": "Say one word.",
        }
        for number in range(1, 21)
    },
    "labels": {
        **{f"qa{number}": ["Bill", "garden", "kitchen", "no", "yes", "nothing"] for number in range(1, 21)},
        "qa19": ["e,e", "n,w", "s,w"],
    },
    "max_new_tokens": 20,
}
_GSM8K_TASK: dict[str, Any] = {
    "doc_to_text": "Puzzle: {{question}}\nReply:",
    "doc_to_target": "{{answer.split('####')[-1].strip() if answer is defined else target}}",
    "num_fewshot": 2,
    "filter_list": [
        {
            "name": "strict-match",
            "filter": [
                {"function": "regex", "regex_pattern": "The answer is (\\-?[0-9\\.\\,]+)."},
                {"function": "take_first"},
            ],
        },
        {
            "name": "flexible-extract",
            "filter": [
                {"function": "regex", "group_select": -1, "regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)"},
                {"function": "take_first"},
            ],
        },
    ],
    "generation_kwargs": {"until": ["Puzzle:", "<end>"], "do_sample": False},
    "metric_list": [
        {
            "metric": "exact_match",
            "aggregation": "mean",
            "higher_is_better": True,
            "ignore_case": True,
            "ignore_punctuation": False,
            "regexes_to_ignore": [",", "\\$", "(?s).*#### ", "\\.$"],
        }
    ],
    "shots": [
        {"question": "Two boats and one more?", "target": "2 + 1 = 3. The answer is 3."},
        {"question": "Half of 10 lamps {now}?", "target": "10 / 2 = 5. The answer is 5."},
    ],
}
GSM8K_TASKS: dict[str, Any] = {
    "gsm8k_cot": _GSM8K_TASK,
    "gsm8k_cot_zeroshot": {
        **_GSM8K_TASK,
        "doc_to_text": "Puzzle: {{question}}\nReply: Slowly.",
        "doc_to_target": "{{answer}}",
        "num_fewshot": 0,
        "shots": [],
    },
}


def template_of(name: str, fields: list[str]) -> str:
    """A template in words of our own that has these fields in this order."""
    return (
        f"Task « {name} »:\n" + "".join(f"part {number} is {field}\n" for number, field in enumerate(fields)) + "Say:"
    )


def scbench_wording() -> dict[str, Any]:
    """Return SCBench's templates in words of our own."""
    kept = ("kv", "prefix_suffix", "vt", "many_shot", "summary", "summary_with_needles", "qa_eng", "qa_chn")
    names = [f"scbench_{name}" for name in (*kept, "choice_eng", "mf")]
    options = "".join(f"\n{letter}: {{OPTION_{letter}}}" for letter in "ABCD")
    asked = dict.fromkeys(names, "{input}")
    asked |= dict.fromkeys(("scbench_qa_eng", "scbench_qa_chn"), "Asked: {question}\nSaid:")
    asked |= {"scbench_choice_eng": f"Asked: {{question}}{options}\nChosen:", "scbench_mf": "{prefix}\n{input}"}
    first = {name: f"Read {name}.\n\n{{context}}\n\n{asked[name]}" for name in names}
    first["scbench_mf"] = "{prefix}\n\n{context}\n\n{input}"
    requests: dict[str, Any] = {name: f"Read {name}.\n\n{{context}}\n" for name in names}
    for name in ("scbench_qa_eng", "scbench_qa_chn", "scbench_choice_eng"):
        requests[name] = [requests[name], asked[name]]
    requests["scbench_mf"] = "{prefix}\n\n{context}\n"
    return {
        "max_new_tokens": {
            **dict.fromkeys(names, 12),
            "scbench_summary_with_needles": {"scbench_summary": 20, "scbench_passkey": 5},
        },
        "first_turn": first,
        "requests": requests,
        "follow_up": {name: f"{{pre_ans}}.\n\n{asked[name]}" for name in names},
        "in_chat": asked,
        "asked_number": "Which number is {target}?",
        "summary_start": "It says",
    }


def own_values() -> dict[str, dict[str, Any]]:
    """Return the ``values`` of each benchmark's protocol."""
    longbench, infinitebench = FIGURES["longbench"], FIGURES["infinitebench"]
    return {
        "longbench": {
            "dataset2prompt": {task: template_of(task, fields) for task, fields in longbench["fields"].items()},
            "dataset2maxlen": longbench["max_new_tokens"],
        },
        "longbench_v2": {"prompts": {"0shot": V2_WORDING, "max_new_tokens": 128}},
        "infinitebench": {
            "prompts": {
                "templates": {
                    template_set: {task: template_of(task, fields) for task, fields in of_tasks.items()}
                    for template_set, of_tasks in infinitebench["fields"].items()
                },
                "max_new_tokens": infinitebench["max_new_tokens"],
                "truncation": infinitebench["truncation"],
            }
        },
        "babilong": {"prompts": BABILONG_WORDING},
        "gsm8k": {"tasks": GSM8K_TASKS},
        "scbench": {"prompts": scbench_wording()},
        "questpasskey": {"passkey": PASSKEY_WORDING | {"question_chars": 400}},
        "ruler": make_protocol() | {"chat_templates": {"base": "{task_template}", "other": "<u>{task_template}</u>"}},
    }


def write_own_protocols(folder: Path) -> Path:
    """Write ``own_values`` as JSON files, as the packed layout has them."""
    values = own_values()
    prompts = values["infinitebench"].pop("prompts")
    values["infinitebench"]["prompts"] = prompts | {"truncation": f"{prompts['truncation']}: both ends stay"}
    for name, files in values.items():
        for stem, content in files.items():
            path = folder / name / f"{stem}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return folder


def pin_own_protocols(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the loader accept only ``own_values`` as official."""
    for name, values in own_values().items():
        monkeypatch.setitem(_SOURCES, name, replace(_SOURCES[name], sha256=values_sha256(values)))
