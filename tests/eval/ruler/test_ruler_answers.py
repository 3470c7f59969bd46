"""RULER's answers: their positions and counts, in every kind of task."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eval.benchmarks.base import Setup
from eval.benchmarks.ruler import Ruler, counting
from eval.benchmarks.ruler.needles import NOISE
from eval.benchmarks.ruler.vocabulary import all_words, words
from eval.sources import essays
from tests.eval.ruler_data import (
    HOTPOT_ROWS,
    PARAGRAPHS,
    items_of,
    needle_args,
    texts_of,
)

# Needles


def needles_in(text: str) -> list[tuple[str, str, str]]:
    return re.findall(r"One of the special magic (\w+) for (\S+(?: \S+)?) is: ([\w-]+)\.", text)


@pytest.mark.parametrize("task", [task for task in Ruler.tasks if task.startswith("niah")])
def test_every_answer_stands_in_the_material_once_with_its_key(setup: Setup, protocol: Any, task: str) -> None:
    args = protocol["tasks"][task]["args"]
    for item in items_of(setup, task, limit=4):
        material, question, references = texts_of(setup, item)
        needles = needles_in(material)
        asked = {key for _, key, value in needles if value in references}
        assert len(references) == args["num_needle_q"] * args["num_needle_v"]
        assert [sum(value == reference for _, _, value in needles) for reference in references] == [1] * len(references)
        assert len(asked) == args["num_needle_q"]
        assert all(question.count(key) == 2 for key in asked)  # in the question and in the answer's beginning
        assert {value for _, key, value in needles if key in asked} == set(references)
        assert {kind for kind, _, _ in needles} == {args["type_needle_v"]}
        if args["type_haystack"] != "needle":
            assert len(needles) == max(args["num_needle_k"], args["num_needle_q"]) * args["num_needle_v"]
        pattern = r"\d{7}" if args["type_needle_v"] == "numbers" else r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
        assert all(re.fullmatch(pattern, reference) for reference in references)


def test_wording_is_singular_only_for_a_single_value(setup: Setup) -> None:
    material, question, _ = texts_of(setup, items_of(setup, "niah_single_1")[0])
    assert material.startswith("<s>A number is below, keep them.\n")
    assert re.search(r"\nName: what is number of (\S+)\? The number of \1 is$", question)

    material, question, _ = texts_of(setup, items_of(setup, "niah_multivalue")[0])
    assert material.startswith("<s>Some numbers are below, keep them.\n")
    assert re.search(r"\nName: what are all numbers of (\S+)\? The numbers of \1 are$", question)


def test_several_keys_are_joined_with_commas_and_an_and(setup: Setup) -> None:
    _, question, references = texts_of(setup, items_of(setup, "niah_multiquery")[0])
    assert len(references) == 4
    assert re.search(r"numbers of [^,]+, [^,]+, [^,]+, and [^,]+\?", question)


def test_depth_is_where_the_needle_stands(setup: Setup) -> None:
    for task in ("niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2"):
        items = items_of(setup, task, 4000, limit=12)
        for item in items:
            material, _, (answer,) = texts_of(setup, item)
            context = material[material.index("\n") :]
            assert item.depth is not None
            assert context.index(answer) / len(context) == pytest.approx(item.depth, abs=0.06), (task, item.sample_id)
        assert len({item.depth for item in items}) > 6
    for task in ("niah_multivalue", "niah_multiquery", "vt", "fwe", "qa_1"):
        assert items_of(setup, task)[0].depth is None


def test_essays_repeat_from_the_start(setup: Setup, data_dir: Path) -> None:
    material, _, _ = texts_of(setup, items_of(setup, "niah_single_2", 60_000, limit=1)[0])
    sentences = " ".join(essays(data_dir).split()).split(". ")
    assert material.count(sentences[0] + ".") >= 2
    assert material.count(sentences[-1]) >= 1
    assert "\n" not in material.partition("\n")[2]  # the essays' line breaks are gone


def test_noise_is_one_line_again_and_again(setup: Setup) -> None:
    material, _, (answer,) = texts_of(setup, items_of(setup, "niah_single_1")[0])
    lines = material.split("\n")[1:]
    assert Counter(lines)[NOISE] == len(lines) - 1
    assert sum(answer in line for line in lines) == 1


def test_needle_settings_come_from_the_protocol(setup: Setup, protocol: Any) -> None:
    protocol["tasks"]["niah_single_1"]["args"] = needle_args("noise", "numbers", "words", (3, 2, 2))
    material, question, references = texts_of(setup, items_of(setup, "niah_single_1")[0])
    needles = needles_in(material)
    assert len(needles) == 6
    assert len(references) == 4
    assert all(re.fullmatch(r"\d{7}", key) for _, key, _ in needles)
    assert sum(question.count(key) for key in {key for _, key, _ in needles}) == 4
    adjectives = set(words("adjective"))
    for reference in references:
        assert any(reference.startswith(f"{adjective}-") for adjective in adjectives)


# Variable tracking


def found(pattern: str, text: str) -> re.Match[str]:
    match = re.search(pattern, text)
    assert match, f"{pattern} not in ...{text[-200:]}"
    return match


def resolve(text: str) -> dict[str, str]:
    """Return the variables with their final numbers."""
    values: dict[str, str] = {}
    for name, right, number in re.findall(r"VAR ([A-Z]+) = (?:VAR ([A-Z]+)|(\d{5}))", text):
        values[name] = number or values[right]  # a KeyError is a copy before its source
    return values


def test_chain_resolves_to_the_value_asked_for(setup: Setup, protocol: Any) -> None:
    for item in items_of(setup, "vt", limit=4):
        material, question, references = texts_of(setup, item)
        example, material = material.split("\n\nFollow")
        value = found(r"Which hold (\d{5})\? These 5 hold \1: $", question)[1]
        values = resolve(material)
        assert list(values) == references
        assert len(references) == 5
        assert all(re.fullmatch("[A-Z]{5}", name) for name in references)
        assert set(values.values()) == {value}
        assert material.count(NOISE) > 10

        answered = found(r"Which hold (\d{5})\? These 5 hold \1:  ([A-Z ]+)$", example)
        shown = resolve(example)
        assert answered[2].split() == list(shown)
        assert set(shown.values()) == {answered[1]}
        assert all(re.fullmatch("[A-Z]{3}", name) for name in shown)
        assert 350 < len(setup.tokenizer(example).input_ids) < 520


def test_chains_and_hops_come_from_the_protocol(setup: Setup, protocol: Any) -> None:
    protocol["tasks"]["vt"]["args"] = {"type_haystack": "noise", "num_chains": 3, "num_hops": 2}
    material, question, references = texts_of(setup, items_of(setup, "vt")[0])
    values = resolve(material.split("\n\nFollow")[1])
    value = found(r"hold (\d{5})\? These 3 ", question)[1]
    assert len(values) == 9
    assert Counter(Counter(values.values()).values()) == {3: 3}
    assert {name for name, held in values.items() if held == value} == set(references)


# Counting


def numbered_lists(text: str) -> list[list[str]]:
    """Words of the numbered lists, one after another; a list begins at 1, and the answer right behind its colon."""
    text = text.replace(":1. ", ":\n1. ")
    lists: list[list[str]] = []
    for number, word in re.findall(r"(?<!\S)(\d+)\. (.+?)(?=\s+\d+\. |\n|$)", text):
        if number == "1":
            lists.append([])
        lists[-1].append(word)
        assert int(number) == len(lists[-1])
    return lists


@pytest.mark.parametrize(
    ("length", "repeats", "example_words", "example_repeats"),
    [(3000, (6, 1), 20, (3, 1)), (8000, (30, 3), 40, (10, 3))],
)
def test_common_words_are_the_most_common(
    setup: Setup, length: int, repeats: tuple[int, int], example_words: int, example_repeats: tuple[int, int]
) -> None:
    material, _, references = texts_of(setup, items_of(setup, "cwe", length)[0])
    example, answer, question = numbered_lists(material)
    counts, shown = Counter(question), Counter(example)
    assert len(references) == 10
    assert all(counts[word] == repeats[0] for word in references)
    assert {count for word, count in counts.items() if word not in references} == {repeats[1]}
    assert question[:10] != references
    assert len(shown) == example_words
    assert {word for word, count in shown.items() if count == example_repeats[0]} == set(answer)
    assert {count for word, count in shown.items() if word not in answer} == {example_repeats[1]}


def test_word_list_continues_with_pairs(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    known = all_words()[::20]
    monkeypatch.setattr(counting, "all_words", lambda: known)
    material, _, references = texts_of(setup, items_of(setup, "cwe", 25_000)[0])
    counts = Counter(numbered_lists(material)[-1])
    assert len(counts) > len(known) + 50
    assert set(counts) > set(known) > set(references)
    assert {word for word, count in counts.items() if count == 30} == set(references)
    assert set(counts.values()) == {30, 3}


@pytest.mark.parametrize("length", [600, 2500, 5000])
def test_next_three_code_words_lead_after_the_dots(setup: Setup, length: int) -> None:
    for item in items_of(setup, "fwe", length, limit=4):
        material, _, references = texts_of(setup, item)
        ranked = Counter(material.removeprefix("<s>Count. ").split()).most_common()
        assert ranked[0][0] == "..."
        assert {word for word, _ in ranked[1:4]} == set(references)
        assert ranked[3][1] > ranked[4][1]
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])
        assert len(ranked) <= length // 50
        assert ranked[0][1] / ranked[1][1] == pytest.approx(4, rel=0.15)


def test_alpha_comes_from_the_protocol(setup: Setup, protocol: Any) -> None:
    protocol["tasks"]["fwe"]["args"] = {"alpha": 3.0}
    material, _, _ = texts_of(setup, items_of(setup, "fwe", 5000)[0])
    ranked = Counter(material.removeprefix("<s>Count. ").split()).most_common()
    assert ranked[0][1] / ranked[1][1] == pytest.approx(8, rel=0.1)


# Questions


def documents_in(material: str) -> dict[int, str]:
    parts = re.split(r"Document (\d+):\n", material)[1:]
    return {int(number): text.strip() for number, text in zip(parts[::2], parts[1::2], strict=True)}


def test_squad_question_stands_with_its_paragraph_among_those_of_its_article(setup: Setup) -> None:
    items = items_of(setup, "qa_1", 1500, limit=8)
    places = []
    for index, item in enumerate(items):
        material, question, references = texts_of(setup, item)
        shown = documents_in(material)
        (place,) = (number for number, text in shown.items() if text.startswith(f"Place {index} lies"))
        places.append(place)
        assert list(shown) == list(range(1, len(shown) + 1))
        assert len(set(shown.values())) == len(shown) > 6
        article = range(index - index % 6, index - index % 6 + 6)
        assert all(any(text.startswith(f"Place {i} lies") for text in shown.values()) for i in article)
        assert references == [f"Place {index}", str(index)]
        assert question == f"\n\nNow answer: What lies north, {index}? Answer:"
    assert len(set(places)) > 2
    assert len(items_of(setup, "qa_1", 1500, limit=None)) == PARAGRAPHS  # unanswerable ones do not count


def test_hotpot_question_stands_with_its_ten_paragraphs(setup: Setup) -> None:
    for index, item in enumerate(items_of(setup, "qa_2", limit=3)):
        material, question, references = texts_of(setup, item)
        shown = documents_in(material)
        own = [text for text in shown.values() if text.startswith(f"Town {index}-")]
        assert len(own) == 10 < len(shown)
        assert references == [f"Town {index}-0"]
        assert f"Which town is row {index}?" in question
    assert len(items_of(setup, "qa_2", limit=None)) == HOTPOT_ROWS
