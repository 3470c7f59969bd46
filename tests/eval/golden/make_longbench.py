"""Make the parts of prompts.json that LongBench's code makes: prompts, and scores of LongBench and LongBench-E."""

from __future__ import annotations

import difflib
import json
import math
import os
import random
import re
import string
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch

from tests.eval.golden.official_code import (
    CUT,
    RecordingModel,
    RecordingTokenizer,
    execute,
    execute_main,
    show,
)

LONGBENCH_WORDING = {
    "qasper": "Read this paper.\n\n{context}\n\nReply in a few words.\n\nQuestion: {input}\n\nReply:",
    "hotpotqa": "Read these.\n{context}\n\nReply briefly to the following, using what stands in the texts above and "
    "nothing else at all.\n\nQuestion: {input}\nReply:",
    "gov_report": "Shorten this.\n{context}\n\nNow, in short:",
    "triviaqa": "Some examples.\n{context}\n\n{input}",
    "lcc": "Go on. \n{context}The next line:\n",
    "repobench-p": "Go on. \n{context}{input}The next line:\n",
    "narrativeqa": "Here is a tale.\n\nTale: {context}\n\nReply to it. Do not provide reasons."
    "\n\nQuestion: {input}\n\nReply:",
    "multifieldqa_en": "Read it.\n\n{context}\n\nNow, reply in some words.\n\nQuestion: {input}\nReply:",
    "2wikimqa": "Compare these.\n{context}\n\nReply from what stands above.\n\nQuestion: {input}\nReply:",
    "musique": "Join these.\n{context}\n\nReply from all that stands above.\n\nQuestion: {input}\nReply:",
    "qmsum": "They met.\n\nSaid:\n{context}\n\nNow, reply in a sentence.\n\nQuery: {input}\nReply:",
    "multi_news": "Some news. \n\nNews:\n{context}\n\nNow, in short, all of it.\n\nIn short:",
    "trec": "Which kind? Some examples.\n\n{context}\n{input}",
    "samsum": "Shorten talks. Some examples.\n\n{context}\n\n{input}",
    "passage_count": "Some of these are alike.\n\n{context}\n\nSay how many differ, as a number.\n\nThe number is: ",
    "passage_retrieval_en": "Texts, and a summary of one.\n\n{context}\n\nThe summary.\n\n{input}\n\n"
    "Say which it is of.\n\nIt is of: ",
}
FIXED_PARTS = {
    "qasper": "Read this paper.\n\n{context}\n\nReply in a few words.\n\nQuestion: ",
    "hotpotqa": "Read these.\n{context}\n\nReply briefly to the following, using what stands in the texts above and "
    "nothing else at all.\n\nQuestion: ",
    "gov_report": "Shorten this.\n{context}\n\n",
    "triviaqa": "Some examples.\n{context}\n\n",
    "lcc": "Go on. \n{context}",
    "repobench-p": "Go on. \n{context}",
    "narrativeqa": "Here is a tale.\n\nTale: {context}\n\nReply to it. Do not provide reasons.\n\nQuestion: ",
    "multifieldqa_en": "Read it.\n\n{context}\n\nNow, reply in some words.\n\nQuestion: ",
    "2wikimqa": "Compare these.\n{context}\n\nReply from what stands above.\n\nQuestion: ",
    "musique": "Join these.\n{context}\n\nReply from all that stands above.\n\nQuestion: ",
    "qmsum": "They met.\n\nSaid:\n{context}\n\nNow, reply in a sentence.\n\nQuery: ",
    "multi_news": "Some news. \n\nNews:\n{context}\n\n",
    "trec": "Which kind? Some examples.\n\n{context}\n",
    "samsum": "Shorten talks. Some examples.\n\n{context}\n\n",
}
"""Squeezed Attention's fixed contexts; its code has none for the other tasks."""
NOT_IN_QUEST = ("samsum",)
"""Tasks that Quest's code refuses."""
E_CUT = 60
"""Tokens to which the official code cuts a prompt of LongBench-E."""
E_LENGTHS = (0, 3999, 4000, 7999, 8000, 60_000)
_QA = (["the green river", "a stone"], ["The green river!", "green lamp", "a stone\nand more", "", "\n\nstone\n river"])
_NEWS = "Boats left the harbour at noon. Fish came home."
_SUMMARY = ([_NEWS], ["Boats left at noon.", "\nFish came home.\nBoats left the harbour.", "", _NEWS, "Lamps."])
_CODE = "return self.value + 1"
_CODES = ([_CODE], ["return self.value", "# so\nreturn self.value + 2", "```\nx += 1", "", _CODE])
E_ANSWERS: dict[str, tuple[list[str], list[str]]] = {
    **dict.fromkeys(("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "triviaqa"), _QA),
    **dict.fromkeys(("gov_report", "multi_news", "samsum"), _SUMMARY),
    **dict.fromkeys(("lcc", "repobench-p"), _CODES),
    "trec": (["Other food"], ["Other food", "Food", "Date or Other food", "\nOther food\nDate", ""]),
    "passage_count": (["7"], ["7", "7 or 8", "There are 17", "", "7, 7 and 8"]),
    "passage_retrieval_en": (["Paragraph 7"], ["Paragraph 7", "7 or 17", "Paragraph 17", "", "7"]),
}
"""References, and what is answered, for the tasks of LongBench-E."""
CLASSES = {"trec": ["Food", "Other food", "Date"], "lsht": ["体育", "农业", "农业科技"]}
_CAPITAL = ["北京是中国的首都。", "中国的首都", "首都北京\n上海", "《北京》", "上海", ""]
CHINESE_ANSWERS: dict[str, tuple[list[str], list[str]]] = {
    **dict.fromkeys(("multifieldqa_zh", "dureader"), (["中国的首都", "北京"], _CAPITAL)),
    "vcsum": (["北京是中国的首都"], _CAPITAL),
    "lsht": (["农业科技"], ["农业科技", "农业", "\n体育和农业科技", "农业科技\n体育", ""]),
    "passage_retrieval_zh": (["段落7"], ["段落7", "7或17", "段落17", "", "段落七"]),
}


def longbench_examples() -> dict[str, dict[str, Any]]:
    """Return a row for each task, longer than ``CUT`` tokens."""
    rng = random.Random(3)
    words = ["river", "stone", "lamp", "seven", "green", "walk", "{brace}", "\n", "quiet", "harbour"]
    return {
        task: {
            "context": " ".join(rng.choice(words) for _ in range(260)),
            "input": f"What about {task}?",
            "answers": ["a stone"],
            "all_classes": None,
            "length": 260,
        }
        for task in LONGBENCH_WORDING
    }


def longbench(clones: Path) -> dict[str, Any]:
    """Run LongBench's and Quest's pred.py, and Squeezed Attention's split, on invented rows."""
    tokenizer, examples = RecordingTokenizer(), longbench_examples()
    cpu = SimpleNamespace(device=lambda _: torch.device("cpu"), no_grad=torch.no_grad, nn=torch.nn, tensor=torch.tensor)
    common = {"torch": cpu, "tqdm": lambda rows: rows, "json": json, "argparse": SimpleNamespace()}
    common["dist"] = SimpleNamespace(destroy_process_group=lambda: None)
    official = execute(show(clones, "LongBench", "LongBench/pred.py"), "longbench", **common)
    quest = execute(show(clones, "Quest", "evaluation/LongBench/pred.py"), "quest", **common)
    squeezed = execute(show(clones, "SqueezedAttention", "squeezedattention/utils.py"), "squeezed", model_name="")
    made: dict[str, Any] = {"wording": LONGBENCH_WORDING, "cut": CUT, "examples": examples, "prompts": {}}
    for task, template in LONGBENCH_WORDING.items():
        model = RecordingModel()
        official["load_model_and_tokenizer"] = lambda *_, model=model: (model, tokenizer)
        rest = (CUT, 4, template, task, "cpu", "llama2")
        official["get_pred"](0, 1, [examples[task]], *rest, {"llama2": ""}, "/dev/null")
        ends = model.options[0].get("eos_token_id", ())
        made["prompts"][task] = {
            "longbench": tokenizer.decode(model.fed[0]),
            "ends_at": [tokenizer.decode([token]) for token in ends if token != tokenizer.eos_token_id],
            "least_new_tokens": max(0, model.options[0].get("min_length", 0) - len(model.fed[0])),
        }
        if task not in NOT_IN_QUEST:
            fed = RecordingModel([tokenizer.eos_token_id])
            quest["get_pred"](fed, tokenizer, [dict(examples[task])], *rest)
            material, *steps = fed.fed
            made["prompts"][task] |= {
                "quest_material": tokenizer.decode(material),
                "quest_question": tokenizer.decode([token for step in steps[:-1] for token in step]),
            }
        if task in FIXED_PARTS:
            whole, fixed = (text.format(**examples[task]) for text in (template, FIXED_PARTS[task]))
            whole, prefix = squeezed["truncate_fn"](whole, fixed, tokenizer, CUT, task, "cpu")
            made["prompts"][task] |= {"squeezed": whole, "squeezed_fixed_tokens": prefix}
    return made


def longbench_e_task(task: str) -> dict[str, Any]:
    """Return rows of all lengths, or without the longest, with what is answered to each."""
    references, said = E_ANSWERS[task]
    rng = random.Random(task)
    lengths = E_LENGTHS[:4] if task == "multi_news" else E_LENGTHS
    predictions = rng.sample([*said, said[0]], len(lengths))
    rows = [{"length": length, "prediction": text} for length, text in zip(lengths, predictions, strict=True)]
    return {"answers": references, "all_classes": CLASSES.get(task), "rows": rows}


@contextmanager
def longbench_folder(model: str) -> Iterator[None]:
    """Change into a folder with the files that LongBench's scripts read, in our own wording."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config").mkdir()
        for name, values in {
            "model2path": {model: ""},
            "model2maxlen": {model: E_CUT},
            "dataset2prompt": LONGBENCH_WORDING,
            "dataset2maxlen": dict.fromkeys(LONGBENCH_WORDING, 4),
        }.items():
            (Path(scratch) / f"config/{name}.json").write_text(json.dumps(values))
        os.chdir(scratch)
        try:
            yield
        finally:
            os.chdir(before)


def longbench_e(clones: Path) -> dict[str, Any]:
    """Run LongBench's ``pred.py --e`` and ``eval.py --e`` on invented rows and a model with known answers."""
    tokenizer, name = RecordingTokenizer(), "llama2"
    shared = {"context": "Some {text} of lamps.\n" * 20, "input": "What about lamps?"}
    made: dict[str, Any] = {}

    def load_dataset(hub_id: str, subset: str, split: str) -> list[dict[str, Any]]:
        task = subset.removesuffix("_e")
        assert subset.endswith("_e")
        made[task] = longbench_e_task(task)
        common = {**shared, **{name: made[task][name] for name in ("answers", "all_classes")}}
        return [{**common, "length": row["length"]} for row in made[task]["rows"]]

    def load_model_and_tokenizer(*_: Any) -> tuple[RecordingModel, RecordingTokenizer]:
        said = [row["prediction"] for row in list(made.values())[-1]["rows"]]
        models.append(RecordingModel(said=[tokenizer.encode(text, add_special_tokens=False) for text in said]))
        return models[-1], tokenizer

    def process(target: Any, args: tuple[Any, ...]) -> Any:
        return SimpleNamespace(start=lambda: target(*args), join=lambda: None)

    models: list[RecordingModel] = []
    cuda = SimpleNamespace(device_count=lambda: 1, is_available=lambda: False)
    arguments = {"parse_args": lambda: SimpleNamespace(model=name, e=True), "os": os, "json": json}
    pred, score = (show(clones, "LongBench", f"LongBench/{script}.py") for script in ("pred", "eval"))
    with longbench_folder(name):
        official = execute(pred, "pred", tqdm=lambda rows: rows, load_dataset=load_dataset)
        official |= {**arguments, "seed_everything": lambda seed: None}
        official["torch"] = SimpleNamespace(device=lambda _: torch.device("cpu"), cuda=cuda)
        official["mp"] = SimpleNamespace(set_start_method=lambda *_, **__: None, Process=process)
        official["dist"] = SimpleNamespace(destroy_process_group=lambda: None)
        official["load_model_and_tokenizer"] = load_model_and_tokenizer
        execute_main(pred, official)
        names = {**official_metrics(clones), "np": numpy}
        execute_main(score, execute(score, "eval", **names) | arguments)
        scores = json.loads(Path(f"pred_e/{name}/result.json").read_text())
    for (task, each), model in zip(made.items(), models, strict=True):
        (each["prompt"],) = {tokenizer.decode(ids) for ids in model.fed}
        each["scores"] = {group: None if math.isnan(mean) else mean for group, mean in scores[task].items()}
    return {"cut": E_CUT, **shared, "tasks": made}


def official_metrics(clones: Path) -> dict[str, Any]:
    """Return the names of LongBench's metrics.py."""
    import jieba
    from fuzzywuzzy import fuzz
    from rouge import Rouge

    packages = {"jieba": jieba, "fuzz": fuzz, "difflib": difflib, "Rouge": Rouge}
    packages |= {"re": re, "string": string, "List": list, "Counter": Counter}
    return execute(show(clones, "LongBench", "LongBench/metrics.py"), "metrics", **packages)


def chinese_scores(clones: Path) -> list[dict[str, Any]]:
    """Score answers to the Chinese tasks with LongBench's eval.py."""
    names = {**official_metrics(clones), "np": numpy}
    scorer = execute(show(clones, "LongBench", "LongBench/eval.py"), "eval", **names)["scorer"]
    return [
        {
            "task": task,
            "prediction": text,
            "references": references,
            "all_classes": CLASSES.get(task),
            "percent": scorer(task, [text], [references], CLASSES.get(task)),
        }
        for task, (references, said) in CHINESE_ANSWERS.items()
        for text in said
    ]


def code_scores(clones: Path) -> list[dict[str, Any]]:
    """Score code with LongBench's metric over both of the matchers that fuzzywuzzy chooses from."""
    from fuzzywuzzy import StringMatcher, fuzz

    score = official_metrics(clones)["code_sim_score"]
    rng = random.Random(2)
    lines = ["return self.value", "x += 1", "for row in rows:", "value = self.values[row]", "", "    return x", "# x"]
    made = []
    for _ in range(30):
        prediction, reference = "\n".join(rng.choices(lines, k=3)), rng.choice(lines) + rng.choice(["", " + 1", ";"])
        scores = {}
        for name, matcher in (("levenshtein", StringMatcher.StringMatcher), ("difflib", difflib.SequenceMatcher)):
            fuzz.SequenceMatcher = matcher
            scores[name] = score(prediction, reference)
        made.append({"prediction": prediction, "reference": reference, "scores": scores})
    return made
