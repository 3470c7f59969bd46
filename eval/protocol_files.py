"""Readers of the benchmarks' official files; files of code are parsed, not executed."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

TURNS_FUNCTION = "create_multiturn_prompt"
"""The function of SCBench that builds the prompts of all turns."""


def _read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def read_json_by_stem(files: Sequence[Path]) -> dict[str, Any]:
    """Return the contents of JSON files by the files' names without suffix."""
    return {file.stem: _read_json(file) for file in files}


def read_longbench_v2_upstream(files: Sequence[Path]) -> dict[str, Any]:
    """Read the prompt of LongBench v2, and the most new tokens of its code."""
    template, code = files
    new_tokens = _default_of(ast.parse(code.read_text(encoding="utf-8")), "query_llm", "max_new_tokens")
    return {"prompts": {"0shot": template.read_text(encoding="utf-8"), "max_new_tokens": new_tokens}}


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


def read_babilong_upstream(files: Sequence[Path]) -> dict[str, Any]:
    """Read BABILong's template, each task's instruction and examples, its possible answers, and the most new tokens."""
    prompts, scores, run = (ast.parse(file.read_text(encoding="utf-8")) for file in files)
    parts = {name: _assigned(prompts, name) for name in ("TASK_TEMPLATE", "USER_TEMPLATE")}
    (main,) = [node for node in run.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    return {
        "prompts": {
            "template": _assigned(prompts, "DEFAULT_TEMPLATE").format(**parts),
            "tasks": _assigned(prompts, "DEFAULT_PROMPTS"),
            "labels": _assigned(scores, "TASK_LABELS"),
            "max_new_tokens": _entry(main, "generate_kwargs", "max_new_tokens"),
        }
    }


def read_scbench_upstream(files: Sequence[Path]) -> dict[str, Any]:
    """Read SCBench's templates, answer lengths, and the wording that its code adds to some prompts."""
    code = ast.parse(files[0].read_text(encoding="utf-8"))
    names = {
        "max_new_tokens": "DATA_NAME_TO_MAX_NEW_TOKENS",
        "first_turn": "multiturn_templates",
        "requests": "multiturn_templates_scdq",
        "follow_up": "multiturn_follow_up_templates",
        "in_chat": "multiturn_follow_up_templates_in_chat_tempate",
    }
    values = {name: _assigned(code, variable) for name, variable in names.items()}
    values["requests"] = {
        task: list(template) if isinstance(template, tuple) else template
        for task, template in values["requests"].items()
    }
    (turns,) = [each for each in code.body if isinstance(each, ast.FunctionDef) and each.name == TURNS_FUNCTION]
    asked = [
        _literal(node.value)
        for node in ast.walk(turns)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.JoinedStr)
    ]
    starts = [
        node.right.value
        for node in ast.walk(turns)
        if isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant) and isinstance(node.right.value, str)
    ]
    if len(set(asked)) != 1 or len(starts) != 1:
        raise LookupError(f"no single question about numbers, or beginning of a summary, in {TURNS_FUNCTION}")
    return {"prompts": values | {"asked_number": asked[0], "summary_start": starts[0]}}


def read_gsm8k_upstream(files: Sequence[Path]) -> dict[str, Any]:
    """Read the settings of GSM8K's tasks that change prompts and scores."""
    names = ("doc_to_text", "doc_to_target", "num_fewshot", "filter_list", "generation_kwargs", "metric_list")
    tasks = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in files]
    kept = [{name: task[name] for name in names} for task in tasks]
    shots = [{"shots": task.get("fewshot_config", {}).get("samples", [])} for task in tasks]
    return {"tasks": {task["task"]: each | shot for task, each, shot in zip(tasks, kept, shots, strict=True)}}


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


def _entry(code: ast.FunctionDef, name: str, key: str) -> Any:
    """Return a literal in the dict that a function assigns to a name."""
    for node in ast.walk(code):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            assert isinstance(node.value, ast.Dict)
            for place, value in zip(node.value.keys, node.value.values, strict=True):
                if isinstance(place, ast.Constant) and place.value == key:
                    return _literal(value)
    raise LookupError(f"no {name}[{key!r}]")


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
