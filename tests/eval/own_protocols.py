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


def template_of(name: str, fields: list[str]) -> str:
    """A template in words of our own that has these fields in this order."""
    return (
        f"Task « {name} »:\n" + "".join(f"part {number} is {field}\n" for number, field in enumerate(fields)) + "Say:"
    )


def own_values() -> dict[str, dict[str, Any]]:
    """Return the ``values`` of each benchmark's protocol."""
    longbench, infinitebench = FIGURES["longbench"], FIGURES["infinitebench"]
    return {
        "longbench": {
            "dataset2prompt": {task: template_of(task, fields) for task, fields in longbench["fields"].items()},
            "dataset2maxlen": longbench["max_new_tokens"],
        },
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
