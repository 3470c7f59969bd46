"""Readers of the benchmarks' official files; files of code are parsed, not executed."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


def _read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def read_json_by_stem(files: Sequence[Path]) -> dict[str, Any]:
    """Return the contents of JSON files by the files' names without suffix."""
    return {file.stem: _read_json(file) for file in files}


def read_infinitebench_packed(files: Sequence[Path]) -> dict[str, Any]:
    """Read InfiniteBench's values from our layout."""
    prompts = _read_json(files[0])
    # The value is a sentence, whose first word is the official code's name for the kind of truncation.
    prompts["truncation"] = prompts["truncation"].partition(":")[0]
    return {"prompts": prompts}


def read_infinitebench_upstream(files: Sequence[Path]) -> dict[str, Any]:
    """Read templates, answer lengths and the kind of truncation from InfiniteBench's code."""
    prompt_code, utilities = (ast.parse(file.read_text(encoding="utf-8")) for file in files)
    sets = ("gpt4_templates", "yarn_mistral_templates", "claude2_templates", "kimi_templates")
    return {
        "prompts": {
            "templates": {name: _assigned(prompt_code, name) for name in sets},
            "max_new_tokens": _assigned(utilities, "DATA_NAME_TO_MAX_NEW_TOKENS"),
            "truncation": _default_of(utilities, "truncate_input", "manner"),
        }
    }


def read_ruler_upstream(files: Sequence[Path]) -> dict[str, Any]:
    """Read task settings, wording and chat templates from RULER's files."""
    constants, task_file, chat_code = files
    tasks = yaml.safe_load(task_file.read_text(encoding="utf-8"))
    every_template = _assigned(ast.parse(constants.read_text(encoding="utf-8")), "TASKS")
    return {
        "tasks": {"templates": {task["task"]: every_template[task["task"]] for task in tasks.values()}, "tasks": tasks},
        "chat_templates": _assigned(ast.parse(chat_code.read_text(encoding="utf-8")), "Templates"),
    }


def read_quest_upstream(files: Sequence[Path]) -> dict[str, Any]:
    """Read the wording of Quest's passkey test, and the number of characters that it feeds token by token."""
    code = ast.parse(files[0].read_text(encoding="utf-8"))
    functions = {each.name: each for each in code.body if isinstance(each, ast.FunctionDef)}
    names = ("task_description", "garbage", "information_line", "final_question")
    passkey = {name: _assigned(functions["generate_prompt"], name) for name in names}
    return {"passkey": passkey | {"question_chars": _assigned(functions["test_model"], "q_length")}}


def _assigned(code: ast.Module | ast.FunctionDef, name: str) -> Any:
    """Return the literal that a module or function assigns to a name, without executing it."""
    for statement in code.body:
        if isinstance(statement, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == name for t in statement.targets
        ):
            return _literal(statement.value)
    raise LookupError(f"no assignment to {name}")


def _default_of(code: ast.Module, function: str, argument: str) -> Any:
    for statement in code.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == function:
            arguments = statement.args.args[len(statement.args.args) - len(statement.args.defaults) :]
            defaults = zip(arguments, statement.args.defaults, strict=True)
            for name, default in defaults:
                if name.arg == argument:
                    return _literal(default)
    raise LookupError(f"no function {function}({argument}=...)")


def _literal(node: ast.expr) -> Any:
    """Evaluate a literal as ``ast.literal_eval`` does, and also dicts of strings joined with ``+``.

    An f-string becomes a template for ``str.format``; its fields may only be names.
    """
    if isinstance(node, ast.JoinedStr):
        return "".join(_template_part(part) for part in node.values)
    if isinstance(node, ast.Dict):
        if None in node.keys:
            raise ValueError("a dict with ** is not a literal")
        pairs = zip(node.keys, node.values, strict=True)
        return {ast.literal_eval(key): _literal(value) for key, value in pairs if key is not None}
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _literal(node.left) + _literal(node.right)
    return ast.literal_eval(node)


def _template_part(part: ast.expr) -> str:
    if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name):
        return f"{{{part.value.id}}}"
    return str(ast.literal_eval(part)).replace("{", "{{").replace("}", "}}")
