"""Prompts and scores against those of the official code, which were computed once (golden/make_prompts.py)."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import eval.benchmarks.questpasskey as questpasskey
import eval.benchmarks.ruler as ruler
from eval import metrics
from eval.benchmarks import BENCHMARKS
from eval.benchmarks.base import Sample, Setup
from eval.benchmarks.questpasskey import passkey_prompt
from eval.benchmarks.ruler.counting import zeta_shares
from eval.benchmarks.ruler.needles import NOISE
from eval.continuations import force_sample
from eval.metrics.references import as_texts
from eval.protocols import Protocol
from tests.eval.own_protocols import FIGURES
from tests.eval.ruler_data import write_files
from tests.eval.tokenizers import tiny_tokenizer

OFFICIAL: dict[str, Any] = json.loads((Path(__file__).parent / "golden/prompts.json").read_text(encoding="utf-8"))
RULER = OFFICIAL["ruler"]["tasks"]
PASSKEY = OFFICIAL["passkey"]
PG19 = json.loads((Path(__file__).parent / "golden/dataset_prompts.json").read_text(encoding="utf-8"))["pg19"]


def texts_of(sample: Sample) -> tuple[str, str]:
    tokenizer = tiny_tokenizer()
    return str(tokenizer.decode(sample.material_ids)), str(tokenizer.decode(sample.question_ids))


# RULER


@pytest.fixture(scope="module")
def ruler_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("ruler"))


@pytest.fixture
def ruler_samples(ruler_files: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the samples of a task as it was given to the official generator."""
    defaults = {"num_needle_k": 1, "num_needle_v": 1, "num_needle_q": 1}
    tasks = {task: {"task": each["family"], "args": defaults | each["args"]} for task, each in RULER.items()}
    values = {"tasks": {"templates": OFFICIAL["ruler"]["wording"], "tasks": tasks}}
    monkeypatch.setattr(ruler, "load_protocol", lambda name, folder: Protocol(name, values, "0" * 64, "here"))

    def make(task: str) -> list[Sample]:
        setup = Setup(tiny_tokenizer(), 100_000, (task,), (RULER[task]["length"],), limit=2, data_dir=ruler_files)
        return [item.build() for item in ruler.Ruler().items(setup)]

    return make


ESSAY_TASKS = tuple(task for task, each in RULER.items() if each["args"].get("type_haystack") == "essay")
DEPTHS = tuple(round(100 * number / 39) for number in range(40))
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
WORDS = r"\D\S*(?: \D\S*)*?"


def layout(task: str, text: str) -> str:
    """Replace what is drawn at random by its kind, and runs of filler by their number."""
    text = re.sub(UUID, "UUID", text)
    text = re.sub(r"\b[A-Z]{5}\b", "NAME5", re.sub(r"\b[A-Z]{3}\b(?<!VAR)", "NAME3", text))
    text = re.sub(r"\b\d{7}\b", "NUMBER7", re.sub(r"\b\d{5}\b", "NUMBER5", text))
    text = re.sub(r"(?<=for )[^\s:]+(?: \S+)?(?= is: )", "KEY", text)
    if task.startswith("niah"):
        text = re.sub(r"(?<= of )\S+(?: [^\s]+)?(?=(?: in it|  ?(?:is|are)))", "KEY", text)
    if task == "cwe":
        text = re.sub(rf"(?<!\S)\d+\. {WORDS}(?=\s+\d+\. |\n|$)", "ITEM", text)
        text = re.sub(r"ITEM(?: ITEM)*", "LIST", text)
    if task == "fwe":
        text = re.sub(r"(?:(?:[a-z]{6}|\.\.\.) )+(?:[a-z]{6}|\.\.\.)(?=\n)", "WORDS", text)
    if task.startswith("qa"):
        text = re.sub(r"(Document )\d+(:\n).+?(?=\n\nDocument |\n\nNow tell)", r"\1N\2TEXT", text, flags=re.DOTALL)
        text = re.sub(r"(?:Document N:\nTEXT\n\n)+", "DOCUMENTS\n\n", text)
    return text


def test_every_ruler_task_is_compared_in_its_official_settings() -> None:
    assert set(RULER) == set(ruler.Ruler.tasks)
    for task, settings in FIGURES["ruler"]["tasks"].items():
        assert RULER[task]["family"] == settings["task"]
        given = {
            name: value for name, value in settings["args"].items() if not name.startswith("num_needle") or value > 1
        }
        assert RULER[task]["args"] == given


@pytest.mark.parametrize("task", [task for task in RULER if task not in ESSAY_TASKS])
def test_ruler_layout_is_the_official_generators(task: str, ruler_samples: Any) -> None:
    """The lines are the same and in the same order, without the filler between them, and so is the filler's amount."""
    samples = ruler_samples(task)
    for sample, official in zip(samples, RULER[task]["samples"], strict=True):
        ours = "".join(texts_of(sample)).removeprefix("<s>")
        theirs = official["input"] + official["answer_prefix"]
        lines = [[line for line in layout(task, text).split("\n") if line != NOISE] for text in (ours, theirs)]
        if task.startswith("niah_multikey"):  # as many lines as fit: all but the needle's are filler
            lines = [list(dict.fromkeys(each)) for each in lines]
        assert lines[0] == lines[1]
        assert abs(ours.count(NOISE) - theirs.count(NOISE)) <= 1  # drawn names differ in tokens
        assert len(sample.references) == len(set(official["outputs"]))


def test_variable_tracking_has_the_official_lines(ruler_samples: Any) -> None:
    for sample, official in zip(ruler_samples("vt"), RULER["vt"]["samples"], strict=True):
        ours, theirs = "".join(texts_of(sample)), official["input"] + official["answer_prefix"]
        example, ours_main = ours.removeprefix("<s>").split("\n\nFollow")
        official_example, main = theirs.split("\n\nFollow")
        assert example.count(NOISE) == official_example.count(NOISE) > 3
        assert abs(ours_main.count(NOISE) - main.count(NOISE)) <= 1
        tokens = tiny_tokenizer()(example.rpartition(": ")[0] + ": ", add_special_tokens=False)["input_ids"]
        assert len(tokens) <= 500


def test_common_words_repeat_as_officially(ruler_samples: Any) -> None:
    def repeats(text: str) -> list[Counter[int]]:
        parts = text.replace("are: 1.", "are:\n1.").split("\n")
        lists = [re.findall(rf"(?<!\S)\d+\. ({WORDS})(?=\s+\d+\. |$)", part) for part in parts]
        return [Counter(Counter(words).values()) for words in lists if words]

    for sample, official in zip(ruler_samples("cwe"), RULER["cwe"]["samples"], strict=True):
        (example, answer, asked), (their_example, their_answer, their_asked) = (
            repeats(text) for text in ("".join(texts_of(sample)), official["input"])
        )
        assert (example, answer) == (their_example, their_answer)
        assert asked[6] == their_asked[6] == 10
        assert asked[1] == pytest.approx(their_asked[1], rel=0.1)


def test_code_words_have_the_official_frequencies(ruler_samples: Any) -> None:
    def counts(text: str) -> list[int]:
        return sorted(Counter(re.findall(r"[a-z]{6}(?= )|\.\.\.", text.split("\n")[0])).values(), reverse=True)

    length = RULER["fwe"]["length"]
    shares = zeta_shares((length - 50) // 50, 2.0)
    for text in ["".join(texts_of(each)) for each in ruler_samples("fwe")] + [
        each["input"] for each in RULER["fwe"]["samples"]
    ]:
        found = counts(text.replace("Count these. ", "").replace("<s>", "").replace("\nWhich", " \nWhich"))
        sizes = range(sum(found), 2 * sum(found))
        assert any([count for share in shares if (count := int(size * share))] == found for size in sizes)


ESSAY_NEEDLE = re.compile(rf" ?One of the special magic (numbers|uuids) for (\S+) is: (\d{{7}}|{UUID})\.")


@pytest.mark.parametrize("task", ESSAY_TASKS)
def test_essays_are_cut_and_needles_inserted_as_officially(task: str, ruler_samples: Any, ruler_files: Path) -> None:
    """The haystack is the essays' first words, and needles are between sentences, at the official depths."""
    essays = json.loads((ruler_files / "PaulGrahamEssays.json").read_text(encoding="utf-8"))["text"].split()
    keys, values, _ = needle_counts(task)
    sizes = []
    for _, text in essay_prompts(task, ruler_samples):
        haystack = text.split(" below.\n")[1].split("\nWhat ")[0]
        needles = list(ESSAY_NEEDLE.finditer(haystack))
        assert {needle[1] for needle in needles} == {RULER[task]["args"]["type_needle_v"]}
        assert sorted(Counter(needle[2] for needle in needles).values()) == [values] * keys
        words = ESSAY_NEEDLE.sub("", haystack).split()
        assert words == essays[: len(words)]
        before = [ESSAY_NEEDLE.sub("", haystack[: needle.start()]).strip() for needle in needles]
        inner = [part for part in before if part.split() != words]  # not behind the last sentence, which is cut
        assert all(not part or part.endswith(".") for part in inner)
        sentences = len(re.split(r"(?<=[.]) ", " ".join(words)))
        places = [len(re.findall(r"[.](?= |$)", part)) for part in inner]
        assert all(place in {int(sentences * depth / 100) for depth in DEPTHS} for place in places)
        sizes.append(len(words))
    # The official code searches with one draw of needles, and takes 500 words off if those of a sample are longer.
    for ours, theirs in zip(sizes[::2], sizes[1::2], strict=True):
        assert min(abs(ours - theirs), abs(ours - theirs - 500)) <= 0.02 * ours


@pytest.mark.parametrize("task", ESSAY_TASKS)
def test_essays_have_the_official_question_and_answers(task: str, ruler_samples: Any) -> None:
    """The text around the essays is the same but for the keys; the answers are the values of the keys asked for."""
    _, values, asked_count = needle_counts(task)
    around = []
    for answers, text in essay_prompts(task, ruler_samples):
        start, rest = text.split(" below.\n")
        haystack, question = rest.split("\nWhat ")
        of_key: dict[str, list[str]] = {}
        for needle in ESSAY_NEEDLE.finditer(haystack):
            of_key.setdefault(needle[2], []).append(needle[3])
        asked = [word for word in re.findall(r"[^\s,]+", question) if word in of_key]
        assert len(set(asked)) == asked_count
        assert asked == 2 * asked[:asked_count]  # in the question, and in the answer's beginning
        assert sorted(answers) == sorted(value for key in set(asked) for value in of_key[key])
        for number, key in enumerate(asked[:asked_count]):
            assert set(of_key[key]) == set(answers[number * values : (number + 1) * values])
            question = question.replace(key, "KEY")
        around.append((start, question))
    assert len(set(around)) == 1


def needle_counts(task: str) -> tuple[int, int, int]:
    """Return the numbers of keys, of values of each, and of keys asked for."""
    keys, values, asked = (RULER[task]["args"].get(f"num_needle_{each}", 1) for each in "kvq")
    return max(keys, asked), values, asked


def essay_prompts(task: str, ruler_samples: Any) -> list[tuple[list[str], str]]:
    """Return our samples' and the official ones in turn: the answers, and the text with the answer's beginning."""
    found = []
    for sample, official in zip(ruler_samples(task), RULER[task]["samples"], strict=True):
        found.append((sample.references, "".join(texts_of(sample)).removeprefix("<s>")))
        found.append((official["outputs"], official["input"] + official["answer_prefix"]))
    return found


# InfiniteBench


@pytest.mark.parametrize("task", OFFICIAL["infinitebench"])
def test_infinitebench_prompt_and_answer_are_the_official_ones(task: str, protocols: Path, tmp_path: Path) -> None:
    official = OFFICIAL["infinitebench"][task]
    (tmp_path / f"{task}.jsonl").write_text(json.dumps(official["example"]) + "\n", encoding="utf-8")
    setup = Setup(tiny_tokenizer(), 40_000, (task,), data_dir=tmp_path, protocol_dir=protocols)
    (item,) = BENCHMARKS["infinitebench"].items(setup)
    sample = item.build()
    assert "".join(texts_of(sample)).removeprefix("<s>") == official["prompt"]
    assert as_texts(sample.references) == as_texts(official["answer"])
    assert not sample.truncated


# PG19


def test_books_are_scored_as_quest_scores_them(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(PG19["text"], encoding="utf-8")
    length = len(PG19["fed"]) + 1
    setup = Setup(tiny_tokenizer(), 100, ("books",), (length,), data_dir=tmp_path, options={"scored": "all"})
    (item,) = BENCHMARKS["pg19"].items(setup)
    sample = item.build()
    assert [*sample.question_ids, *sample.forced_ids[:-1]] == PG19["fed"]

    class Model:
        """The model whose predictions the official code was given."""

        device = torch.device("cpu")

        def __call__(self, input_ids: torch.Tensor, **_: Any) -> Any:
            logits = torch.arange(PG19["vocabulary"]).float().add(int(input_ids[0, -1])).remainder(7)
            return SimpleNamespace(logits=logits[None, None])

    found = force_sample(Model(), sample, None).result  # type: ignore[arg-type]
    assert found["perplexity"] == pytest.approx(PG19["perplexity"], rel=1e-5)
    assert found["nll_by_position"] == [[1, pytest.approx(sum(PG19["losses"]) / len(PG19["losses"]), rel=1e-6)]]


# Quest's passkey test


@pytest.mark.parametrize("number", range(len(PASSKEY["prompts"])))
def test_passkey_prompt_is_quests(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    official = PASSKEY["prompts"][number]
    wording = PASSKEY["wording"] | {"question_chars": 400}
    assert passkey_prompt(wording, 4 * 300, official["depth"], official["key"]) == official["text"]
    values = {"passkey": wording}
    protocol = Protocol("questpasskey", values, "0" * 64, "here")
    monkeypatch.setattr(questpasskey, "load_protocol", lambda name, folder: protocol)
    items = BENCHMARKS["questpasskey"].items(Setup(tiny_tokenizer(), 10_000, ("filler",), (300,)))
    assert [item.depth for item in items] == [depth / 100 for depth in range(1, 101)]
    sample = items[official["depth"] - 1].build()
    material, question = texts_of(sample)
    key, own = str(sample.references), str(official["key"])
    assert 1 <= int(key) <= 50_000
    text = official["text"].replace(own, key)
    assert (material, question) == (f"<s>{text[:-400]}", text[-400:])
    if len(key) == len(own):
        assert material == official["material"].replace(own, key)
        assert question == official["question"].replace(own, key)


def test_passkey_scores_are_quests() -> None:
    for case in PASSKEY["scores"]:
        assert metrics.score("questpasskey", "filler", case["response"], str(case["key"])) == case["score"], case
    assert {case["score"] for case in PASSKEY["scores"]} == {0, 1}


def test_a_smaller_number_of_passkeys_is_spread_as_quest_spreads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = Protocol("questpasskey", {"passkey": PASSKEY["wording"] | {"question_chars": 400}}, "0" * 64, "here")
    monkeypatch.setattr(questpasskey, "load_protocol", lambda name, folder: protocol)
    items = BENCHMARKS["questpasskey"].items(Setup(tiny_tokenizer(), 10_000, ("filler",), (300,), limit=20))
    assert [item.sample_id for item in items] == [str(5 * (number + 1)) for number in range(20)]
