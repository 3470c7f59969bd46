"""Make dataset_prompts.json: prompts and scores by the official code of benchmarks that have rows of their own.

``python -m tests.eval.golden.make_dataset_prompts CLONES`` needs clones at the commits of ``COMMITS``, as
``make_prompts.py`` does. Rows and wording are our own. lm-evaluation-harness is imported from its clone; the packages
that it needs must be installed.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import string
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import torch

from tests.eval.golden.official_code import CUT, RecordingTokenizer, execute, show
from tests.eval.own_protocols import BABILONG_WORDING, GSM8K_TASKS, V2_WORDING, scbench_wording
from tests.eval.tokenizers import tiny_tokenizer

COMMITS = {
    "LongBench": "2e00731f8d0bff23dc4325161044d0ed8af94c1e",
    "Quest": "01c1623bf9395009520874e989e29f683203b357",
    "MInference": "fb56c917f618e8645f1cfc37535afd7424d78f0d",
    "babilong": "7a6efee29f5cac03c3c410e6799c80fd2ffe3610",
    "lm-evaluation-harness": "4e7e0d47f33bc71070c1d38394bafbb52b117163",
}
VOCABULARY = 2000
"""Size of the tests' tokenizer."""


def official_file(clones: Path, name: str, path: str) -> str:
    """Return an official file at its commit."""
    return show(clones, name, path, COMMITS[name])


def longbench_v2_examples() -> list[dict[str, str]]:
    """Return rows, the last of which is longer than ``CUT`` tokens and has a field's mark in its context."""
    contexts = ["  Some {text}.\n" * 3, "Boats left $Q$ at noon.\n" * 90]
    return [
        {
            "_id": f"row-{number}",
            "domain": "Long In-context Learning",
            "sub_domain": "invented",
            "difficulty": "hard",
            "length": "short",
            "question": " Which harbour? ",
            **{f"choice_{letter}": f"harbour {letter} " for letter in "ABCD"},
            "answer": "B",
            "context": context,
        }
        for number, context in enumerate(contexts)
    ]


def longbench_v2(clones: Path) -> dict[str, Any]:
    """Run LongBench v2's pred.py on invented rows, and its extraction of the answer."""
    code = "\n".join(
        line
        for line in official_file(clones, "LongBench", "pred.py").splitlines()
        if not line.startswith(("template_", "model_map =", "maxlen_map ="))
    )
    asked: list[dict[str, Any]] = []
    tokenizer = RecordingTokenizer()

    def create(**request: Any) -> Any:
        asked.append(request)
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="none"))])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    official = execute(
        code,
        "pred",
        re=re,
        json=json,
        tqdm=lambda rows: rows,
        template_0shot=V2_WORDING,
        model_map={"model": "model"},
        maxlen_map={"model": CUT},
        OpenAI=lambda **_: client,
        AutoTokenizer=SimpleNamespace(from_pretrained=lambda *_, **__: tokenizer),
    )
    examples = longbench_v2_examples()
    arguments = SimpleNamespace(model="model", rag=0, no_context=False, cot=False)
    official["get_pred"]([dict(example) for example in examples], arguments, io.StringIO())
    said = ["The correct answer is ({})", "**The correct answer is {}**.", "the correct answer is ({})", "({})", ""]
    said += ["The correct answer is A. No: The correct answer is ({})", "The correct answer is\n({})", "{}"]
    return {
        "cut": CUT,
        "examples": examples,
        "prompts": [request["messages"][0]["content"] for request in asked],
        "max_new_tokens": asked[0]["max_tokens"],
        "scores": [
            {"prediction": text, "score": float(official["extract_answer"](text) == "B")}
            for text in [each.format(letter) for each in said for letter in "ABE"]
        ],
    }


def babilong(clones: Path) -> dict[str, Any]:
    """Fill BABILong's template, and score answers."""
    prompts = execute(official_file(clones, "babilong", "babilong/prompts.py"), "prompts")
    compare = execute(official_file(clones, "babilong", "babilong/metrics.py"), "metrics")["compare_answers"]
    example = {
        "input": "\n Bill went to the garden. Some {text} of a book. Bill took the lamp.\n",
        "question": "Where is Bill? ",
        "target": "garden",
    }
    wording = BABILONG_WORDING["tasks"]["qa1"]
    text = prompts["get_formatted_input"](
        example["input"], example["question"], template=BABILONG_WORDING["template"], **wording
    )
    rng = random.Random(4)
    words = ["Bill", "garden", "kitchen", "yes", "no", "nothing", ". ", ", ", "<example>", "<context>", "Question"]
    cases = []
    for task, question, targets in (
        ("qa1", "Where is Bill?", ["garden", "kitchen", "yes"]),
        ("qa8", "What holds Bill?", ["garden,kitchen", "nothing", "kitchen"]),
        ("qa19", "From the garden?", ["n,w", "e,e"]),
    ):
        for number in range(24):
            target = targets[number % len(targets)]
            said = " ".join(rng.choices([*words, target, target, target], k=rng.randint(0, 5)))
            labels = BABILONG_WORDING["labels"][task]
            score = float(compare(target, said, question, labels))
            cases.append({"task": task, "question": question, "target": target, "prediction": said, "score": score})
    return {"example": example, "prompt": text, "scores": cases}


def gsm8k(clones: Path) -> dict[str, Any]:
    """Build prompts and score answers with lm-evaluation-harness."""
    answers = [{"question": "How many {boats} left?", "answer": "Some.\n1,000 and more.\n#### 1,234"}]
    answers += [{"question": "And lamps?\nTwo lines.", "answer": "None.\n#### -7"}]
    said = [
        "The answer is {}.",
        "The answer is ${}",
        "so {} or 5",
        "The answer is 3. The answer is {}.",
        "",
        "it is {}%",
    ]
    said += ["The answer is {} boats. Puzzle: 9", "**{}**", "The answer is {}.\n\n2 boats"]
    made: dict[str, Any] = {"rows": answers, "prompts": {}, "scores": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        archive = ["git", "-C", str(clones / "lm-evaluation-harness"), "archive", COMMITS["lm-evaluation-harness"]]
        packed = subprocess.run([*archive, "lm_eval"], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", scratch], input=packed, check=True)
        sys.path.insert(0, scratch)
        from lm_eval.api.task import ConfigurableTask

        rows = [row for row in answers for _ in said]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for name, settings in GSM8K_TASKS.items():
            config = {key: value for key, value in settings.items() if key != "shots"}
            config |= {"task": name, "dataset_path": "json", "output_type": "generate_until", "test_split": "test"}
            config |= {"dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
            if settings["shots"]:
                config["fewshot_config"] = {"sampler": "first_n", "samples": settings["shots"]}
            task = ConfigurableTask(config=config)
            task.build_all_requests()
            made["prompts"][name] = list(dict.fromkeys(instance.args[0] for instance in task.instances))
            for number, instance in enumerate(task.instances):
                target = rows[number]["answer"].split("#### ")[1]
                instance.resps = [said[number % len(said)].format(target)]
            task.apply_filters()
            for number, instance in enumerate(task.instances):
                scores = {
                    kind: task.process_results(rows[number], [found])["exact_match"]
                    for kind, found in instance.filtered_resps.items()
                }
                case = {"task": name, "prediction": instance.resps[0], "reference": rows[number]["answer"]}
                made["scores"].append(case | {"scores": {kind: float(score) for kind, score in scores.items()}})
    return made


def scbench_examples() -> dict[str, dict[str, Any]]:
    """Return a row for each file of SCBench."""
    answers: dict[str, list[Any]] = {
        "kv": ["a1b2", "c3d4"],
        "vt": [["ABC", "XYZ"], ["QQQ"]],
        "many_shot": [["(A)"], ["(B)"]],
        "mf": [12, 3.5],
        "qa_eng": ["Ines Rey", "Vigo"],
        "qa_chn": ["\u6e2f\u53e3", "\u706f"],
        "choice_eng": ["lamp", "boat"],
        "summary_with_needles": ["12345", "A long story."],
    }
    rows = {}
    for name in sorted({each.removeprefix("scbench_") for each in scbench_wording()["in_chat"]}):
        turns: list[dict[str, Any]] = [
            {"input": f"What is {number} of {name}?", "answer": answer}
            for number, answer in enumerate(answers.get(name, ["first said", "then said"]))
        ]
        for place, turn in enumerate(turns):
            if name == "mf":
                turn["input"] = f"Only a number. The {['median', 'Largest Number'][place]} is"
            if name == "choice_eng":
                turn["options"] = ["river", "lamp", "boat", "stone"]
            if name == "summary_with_needles":
                turn["task"] = ["scbench_passkey", "scbench_summary"][place]
        context = [12, 3.5, 7] * 40 if name == "mf" else f"Boats {{of}} {name} left.\n" * 40
        rows[name] = {"id": 0, "context": context, "multi_turns": turns}
    return rows


def as_loaded(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as the official code reads it from a file: with ``datasets``, whose columns have one type each."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "row.jsonl"
        path.write_text(json.dumps(row), encoding="utf-8")
        (loaded,) = datasets.load_dataset("json", data_files=str(path), split="train", streaming=True)
    return dict(loaded)


def scbench(clones: Path) -> dict[str, Any]:
    """Build SCBench's prompts in both modes, with and without a chat template, and score answers."""
    code = official_file(clones, "MInference", "scbench/eval_utils.py")
    wording = scbench_wording()
    code = code.replace('f"What is {target}?"', f"f{wording['asked_number']!r}")
    code = code.replace('"This paper"', repr(wording["summary_start"]))
    names = {"torch": torch, "re": re, "json": json, "GreedySearch": object}
    official = execute(code.split("class GreedySearch")[0], "eval_utils", **names)
    official["multiturn_templates"].update(wording["first_turn"])
    official["multiturn_templates_scdq"].update(wording["requests"])
    official["multiturn_follow_up_templates"].update(wording["follow_up"])
    official["multiturn_follow_up_templates_in_chat_tempate"].update(wording["in_chat"])
    rows = scbench_examples()
    made: dict[str, Any] = {"rows": rows, "prompts": {}, "scores": []}
    for name, row in rows.items():
        for chat in (False, True):
            for mode, build in (("turns", "create_multiturn_prompt"), ("requests", "create_scdq_prompt")):
                found = official[build](as_loaded(row), f"scbench_{name}", tiny_tokenizer(chat), chat)
                made["prompts"][f"{name}, {mode}, {'chat' if chat else 'plain'}"] = found["prompts"]
    compute = official_file(clones, "MInference", "scbench/compute_scores.py")
    rouge = SimpleNamespace(compute=lambda **given: {"rougeLsum": [rouge_l_sum(**given)]})
    loader = SimpleNamespace(load=lambda name: rouge)
    scores = execute(compute, "compute_scores", re=re, string=string, Counter=Counter, evaluate=loader)
    said = ["{}", "it is {} indeed", "", "{}5", "3.5", "12.9", "B", "A. {}", "answer is {}", "nothing at all, 12"]
    for name, row in rows.items():
        labels = official["get_ground_truth"](row, f"scbench_{name}")
        for turn, label in zip(row["multi_turns"], labels, strict=True):
            kind = turn.get("task", f"scbench_{name}")
            task = scores["Multiturnbench_to_Infinitebench"].get(kind, kind)
            # The official code compares with each character of a text; the tests are of whole answers.
            label = [label] if name == "qa_chn" else label
            first = label[0] if isinstance(label, list) else label
            for text in [each.format(first) for each in said]:
                score = float(scores["get_score_one"](text, label, task, "model"))
                made["scores"].append({"task": name, "kind": kind, "label": label, "prediction": text, "score": score})
    return made


def rouge_l_sum(predictions: list[str], references: list[str], use_aggregator: bool) -> float:
    """Return the value of the metric ``rouge`` of evaluate, whose script is not at hand offline."""
    from rouge_score.rouge_scorer import RougeScorer

    found = RougeScorer(["rougeLsum"]).score(references[0], predictions[0])
    return float(found["rougeLsum"].fmeasure)


def pg19(clones: Path) -> dict[str, Any]:
    """Run Quest's measure of perplexity on a short text, over a model whose predictions are known."""
    code = official_file(clones, "Quest", "evaluation/pg19/ppl_eval.py").replace('device = "cuda"', 'device = "cpu"')
    text = "Boats left the harbour at noon, and came home with fish."
    fed: list[int] = []

    def model(input_ids: torch.Tensor, **_: Any) -> Any:
        fed.extend(input_ids[0].tolist())
        logits = torch.arange(VOCABULARY).float().add(fed[-1]).remainder(7)[None, None]
        return SimpleNamespace(logits=logits, past_key_values=())

    model_like = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCABULARY), eval=lambda: None)
    tokenizer = RecordingTokenizer()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = SimpleNamespace(quest=False, output_dir=scratch, num_eval_tokens=None, model_name_or_path="")
        parser = SimpleNamespace(add_argument=lambda *_, **__: None, parse_args=lambda: arguments)
        callable_model = type("Model", (), {"__call__": lambda self, *given, **named: model(*given, **named)})()
        callable_model.__dict__.update(model_like.__dict__)
        tokenizer.__dict__["pad_token_id"] = 0
        bar = type("Bar", (list,), {"set_description": lambda self, text: None})
        # Statements under an `if` are left out: they patch the model, end early, or name a padding token.
        execute(
            code,
            "ppl_eval",
            torch=torch,
            os=os,
            CrossEntropyLoss=torch.nn.CrossEntropyLoss,
            argparse=SimpleNamespace(ArgumentParser=lambda: parser),
            tqdm=bar,
            print=lambda *_, file=None, **__: file.write(f"{_[0]}\n") if file else None,
            load_dataset=lambda *_, **__: {"text": [text]},
            AutoTokenizer=SimpleNamespace(from_pretrained=lambda *_, **__: tokenizer),
            AutoModelForCausalLM=SimpleNamespace(from_pretrained=lambda *_, **__: callable_model),
        )
        losses = [float(line) for line in (Path(scratch) / "log.txt").read_text().split()]
        perplexity = float((Path(scratch) / "ppl.txt").read_text())
    return {"text": text, "vocabulary": VOCABULARY, "fed": fed, "losses": losses, "perplexity": perplexity}


def main(clones: Path) -> None:
    """Write ``dataset_prompts.json`` next to this file."""
    made = {"commits": COMMITS, "longbench_v2": longbench_v2(clones), "babilong": babilong(clones)}
    made["scbench"] = scbench(clones)
    made["pg19"] = pg19(clones)
    made["gsm8k"] = gsm8k(clones)
    path = Path(__file__).with_name("dataset_prompts.json")
    path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
