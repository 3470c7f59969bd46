"""Make prompts.json: prompts built by the official code of five repositories.

``python -m tests.eval.golden.make_prompts CLONES`` needs clones with the commits of ``official_code.COMMITS``, in
folders named as its keys, and the packages fuzzywuzzy and python-Levenshtein. The wording is our own: it is put in
place of the official one before the official code runs.
"""

from __future__ import annotations

import ast
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.eval.golden.make_longbench import chinese_scores, code_scores, longbench, longbench_e
from tests.eval.golden.official_code import COMMITS, RecordingModel, RecordingTokenizer, execute, show
from tests.eval.own_protocols import PASSKEY_WORDING, own_values
from tests.eval.ruler_data import write_files
from tests.eval.tokenizers import tiny_tokenizer

RULER_WORDING = {
    "niah": {
        "tokens_to_generate": 20,
        "template": "Some {type_needle_v} are below.\n{context}\nWhat are all the {type_needle_v} of {query} in it?",
        "answer_prefix": " Truly, the {type_needle_v} of {query} are",
    },
    "variable_tracking": {
        "tokens_to_generate": 10,
        "template": "Follow the copies of numbers.\n\n{context}\nWhich names hold {query}?",
        "answer_prefix": " Hence these {num_v} hold {query}: ",
    },
    "common_words_extraction": {
        "tokens_to_generate": 40,
        "template": "Here is a list.\n{context}\nWhich ten are common?",
        "answer_prefix": " The common ones are:",
    },
    "freq_words_extraction": {
        "tokens_to_generate": 50,
        "template": "Count these. {context}\nWhich three lead?",
        "answer_prefix": " The leading ones are:",
    },
    "qa": {
        "tokens_to_generate": 16,
        "template": "Read all of it.\n\n{context}\n\nNow tell: {query}",
        "answer_prefix": " Reply is:",
    },
}
RULER_ARGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "niah_single_1": ("niah", 900, {"type_haystack": "noise", "type_needle_k": "words", "type_needle_v": "numbers"}),
    "niah_single_2": ("niah", 4000, {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "numbers"}),
    "niah_single_3": ("niah", 2500, {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "uuids"}),
    "niah_multivalue": (
        "niah",
        4000,
        {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "numbers", "num_needle_v": 4},
    ),
    "niah_multiquery": (
        "niah",
        2500,
        {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "numbers", "num_needle_q": 4},
    ),
    "niah_multikey_1": (
        "niah",
        2500,
        {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "numbers", "num_needle_k": 4},
    ),
    "niah_multikey_2": ("niah", 900, {"type_haystack": "needle", "type_needle_k": "words", "type_needle_v": "numbers"}),
    "niah_multikey_3": ("niah", 900, {"type_haystack": "needle", "type_needle_k": "uuids", "type_needle_v": "uuids"}),
    "vt": ("variable_tracking", 1600, {"type_haystack": "noise", "num_chains": 1, "num_hops": 4}),
    "cwe": ("common_words_extraction", 2000, {"freq_cw": 30, "freq_ucw": 3, "num_cw": 10}),
    "fwe": ("freq_words_extraction", 1500, {"alpha": 2.0}),
    "qa_1": ("qa", 900, {"dataset": "squad"}),
    "qa_2": ("qa", 2000, {"dataset": "hotpotqa"}),
}
INFINITEBENCH_WORDING = own_values()["infinitebench"]["prompts"]["templates"]["yarn_mistral_templates"]
_RESPONSES = [" {key}.", "{key}", " it is {key}1", "0{key}", " 7 and {key}", " none", "", " the key: {key} or 3"]


def ruler(clones: Path) -> dict[str, Any]:
    """Run RULER's generators on invented data."""
    made = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "synthetic/json").mkdir(parents=True)
        for name in ("tokenizer.py", "manifest_utils.py"):
            (folder / name).write_text(show(clones, "RULER", f"scripts/data/{name}"))
        for family in RULER_WORDING:
            script = show(clones, "RULER", f"scripts/data/synthetic/{family}.py")
            (folder / f"synthetic/{family}.py").write_text(script)
        (folder / "synthetic/constants.py").write_text(f"TASKS = {RULER_WORDING!r}\n")
        # Modules for tokenizers of services, and for sentences of essays: imported, but not used here.
        (folder / "synthetic/tenacity.py").write_text(
            "retry = lambda **_: lambda f: f\n"
            + "\n".join(f"{name} = lambda *_: 0" for name in ("stop_after_attempt", "wait_fixed", "wait_random"))
        )
        # In place of nltk's sentences, which need a download: those of the essays here end at full stops alone.
        (folder / "synthetic/nltk").mkdir()
        (folder / "synthetic/nltk/__init__.py").touch()
        (folder / "synthetic/nltk/tokenize.py").write_text(
            "import re\nsent_tokenize = lambda text: re.split(r'(?<=[.]) ', text)\n"
        )
        # More words than any list here has: the generator measures one of them before it chooses a size.
        words = {number: f"word{number}" for number in range(20_000)}
        (folder / "synthetic/json/english_words.json").write_text(json.dumps(words))
        write_files(folder / "synthetic/json")
        tiny_tokenizer().save_pretrained(folder / "tokenizer")
        for task, (family, length, args) in RULER_ARGS.items():
            wording = RULER_WORDING[family]
            command = [sys.executable, str(folder / f"synthetic/{family}.py"), "--save_dir", scratch]
            command += ["--save_name", task, "--subset", "made", "--tokenizer_path", str(folder / "tokenizer")]
            command += ["--tokenizer_type", "hf", "--max_seq_length", str(length), "--num_samples", "2"]
            command += ["--tokens_to_generate", str(wording["tokens_to_generate"])]
            command += ["--template", f"{wording['template']}{wording['answer_prefix']}"]
            command += [part for name, value in args.items() for part in (f"--{name}", str(value))]
            command += ["--pre_samples", "0"] if family == "qa" else []
            command += ["--add_fewshot"] if family == "variable_tracking" else []
            subprocess.run(command, check=True)
            lines = (folder / task / "made.jsonl").read_text().splitlines()
            kept = ("input", "answer_prefix", "outputs", "length")
            samples = [{name: json.loads(line)[name] for name in kept} for line in lines]
            made[task] = {"family": family, "length": length, "args": args, "samples": samples}
    return {"wording": RULER_WORDING, "tasks": made}


def infinitebench_examples() -> dict[str, dict[str, Any]]:
    """Return a row for each task."""
    options = ["a lamp", "a stone", "a river", "a harbour"]
    rows: dict[str, dict[str, Any]] = {
        task: {"context": f"Some {{text}} of {task}.\n" * 3, "input": f"What is in {task}?", "answer": ["a stone"]}
        for task in INFINITEBENCH_WORDING
    }
    rows["code_run"] |= {"input": "Please give me the result of func_12(-3).", "answer": 14}
    rows["math_find"] |= {
        "context": "[3, 9, 2]",
        "input": "One number only. The second largest number of it is:",
        "answer": 3,
    }
    rows["math_calc"] |= {"context": "1 + 2 - 5", "answer": [3, -2]}
    rows["code_debug"] |= {"options": options, "answer": "a stone"}
    rows["longbook_choice_eng"] |= {"options": options, "answer": ["a harbour", "D"]}
    return rows


def infinitebench(clones: Path) -> dict[str, Any]:
    """Build InfiniteBench's prompts and answers."""
    sets: dict[str, Any] = {f"{name}_templates": {} for name in ("gpt4", "kimi", "claude2")}
    code = show(clones, "InfiniteBench", "src/eval_utils.py")
    given = {**sets, "yarn_mistral_templates": INFINITEBENCH_WORDING}
    official = execute(code, "eval_utils", re=re, json=json, Path=Path, **given)
    return {
        task: {
            "example": example,
            "prompt": official["create_prompt"](dict(example), task, "yarn-mistral", "."),
            "answer": official["get_answer"](example, task),
        }
        for task, example in infinitebench_examples().items()
    }


class OwnWording(ast.NodeTransformer):
    """Put our own wording into Quest's passkey prompt."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Replace a text that is assigned to one of the names."""
        (target,) = node.targets
        wording = PASSKEY_WORDING.get(getattr(target, "id", ""))
        if wording is not None:
            node.value = ast.parse(f"f{wording!r}" if "{" in wording else repr(wording), mode="eval").body
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """Leave out checks of the official wording."""
        return ast.Pass()


def passkey(clones: Path) -> dict[str, Any]:
    """Run Quest's passkey test: its prompts, what it feeds at once and token by token, and its score."""
    tree = OwnWording().visit(ast.parse(show(clones, "Quest", "evaluation/passkey/passkey.py")))
    official = execute(ast.unparse(tree), "passkey", torch=torch, re=re, random=random, ArgumentParser=None)
    tokenizer = RecordingTokenizer()
    random.seed(5)
    made: dict[str, Any] = {"wording": PASSKEY_WORDING, "prompts": [], "scores": []}
    for depth in (1, 50, 100):
        text, key, *_ = official["generate_prompt"](4 * 300, depth)
        model = RecordingModel()
        official["test_model"](SimpleNamespace(tokenizer=tokenizer, model=model), text, key)
        material, *steps = model.fed
        question = [token for step in steps[:-1] for token in step]
        sample = {"depth": depth, "key": key, "text": text, "material": tokenizer.decode(material)}
        made["prompts"].append(sample | {"question": tokenizer.decode(question)})
    for response in _RESPONSES:
        text, key, *_ = official["generate_prompt"](400, 10)
        said = response.format(key=key)
        ids = [*tokenizer.plain(said, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        model = RecordingModel(ids, after=len(tokenizer.plain(text[-400:])["input_ids"]) - 1)
        given = official["test_model"](SimpleNamespace(tokenizer=tokenizer, model=model), text, key)
        made["scores"].append({"response": said, "key": key, "score": float(given == key)})
    return made


def main(clones: Path) -> None:
    """Write ``prompts.json`` next to this file."""
    made = {"commits": COMMITS, "ruler": ruler(clones), "longbench": longbench(clones), "passkey": passkey(clones)}
    made["infinitebench"] = infinitebench(clones)
    made["longbench_e"] = longbench_e(clones)
    made["code_scores"] = code_scores(clones)
    made["chinese_scores"] = chinese_scores(clones)
    path = Path(__file__).with_name("prompts.json")
    path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
