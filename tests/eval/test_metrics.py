"""Scores compared with the official scorers' (golden/scores.jsonl) or computed by hand, and their properties."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.errors import EvalError
from eval.metrics import named_scores, score, tasks

GOLDEN = Path(__file__).parent / "golden" / "scores.jsonl"
BENCHMARKS = {"longbench": 21, "infinitebench": 12, "ruler": 13, "passkey": 2, "needle": 2}
ALL_TASKS = [(benchmark, task) for benchmark in BENCHMARKS for task in tasks(benchmark)]
CLASSES = ["Food", "Other food", "Date", "农业", "农业科技"]

# References as in the benchmarks' data; other tasks take any text.
REFERENCES: dict[str, Any] = {
    "trec": ["Food"],
    "lsht": ["农业"],
    "passage_count": "7",
    "passage_retrieval_en": ["Paragraph 7"],
    "passage_retrieval_zh": ["段落7"],
    "passkey": "71432",
    "number_string": "11988",
    "longbook_choice_eng": ["Paris", "A"],
    "longdialogue_qa_eng": ["JOHN"],
    "math_find": 17,
    "math_calc": [3, 14, 15],
    "code_run": -4,
    "code_debug": ["parse_args", "B"],
}
EXACT = {  # what to say where the reference's own text is not the right form of an answer
    "math_calc": "[3, 14, 15]",
    "code_debug": "B.",
    "longbook_choice_eng": "A",
}
# Pieces of text that the scorers treat specially, and other text.
PIECES = [
    *("A", "B.", "C:", "answer is:", "option is", "is: ", "Option", "7", "3.5", "-4", "Paragraph ", "段落", "农业"),
    *("Food", "Other ", "the", "JOHN", "parse_args", "`", "# ", "//", "\n", "\x01", " ", ".", "\uff0c", "71432"),
]
ANSWERS = st.text() | st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def references_of(benchmark: str, task: str) -> Any:
    if benchmark == "passkey":
        return "71432"
    return REFERENCES.get(task, ["river naïve council", "Paris 3 return"])


@pytest.fixture(scope="module")
def golden() -> list[dict[str, Any]]:
    return [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]


def golden_score(case: dict[str, Any], references: Any) -> float:
    return score(case["benchmark"], case["task"], case["prediction"], references, case["all_classes"])


def test_official_scores_are_reproduced(golden):
    differing = [
        (case, ours) for case in golden if abs((ours := golden_score(case, case["references"])) - case["score"]) > 1e-6
    ]
    assert len(golden) == 301
    assert not differing


def test_references_as_texts_score_the_same(golden):
    for case in golden:
        given_references = case["references"]
        as_list = given_references if isinstance(given_references, list) else [given_references]
        assert golden_score(case, [str(reference) for reference in as_list]) == golden_score(case, given_references)


@pytest.mark.parametrize(("benchmark", "count"), BENCHMARKS.items())
def test_every_task_has_a_scorer(benchmark, count):
    assert len(tasks(benchmark)) == count


@pytest.mark.parametrize(("benchmark", "task"), ALL_TASKS)
@settings(max_examples=40, deadline=None)
@given(prediction=ANSWERS)
def test_any_prediction_scores_between_0_and_1(benchmark, task, prediction):
    assert 0.0 <= score(benchmark, task, prediction, references_of(benchmark, task), CLASSES) <= 1.0


@settings(max_examples=100, deadline=None)
@given(prediction=st.text(), reference=st.text(), data=st.data())
def test_any_text_can_be_a_reference_where_answers_are_free_text(prediction, reference, data):
    free = ["qasper", "multifieldqa_zh", "dureader", "gov_report", "vcsum", "samsum", "trec", "lcc", "passage_count"]
    task = data.draw(st.sampled_from(free))
    assert 0.0 <= score("longbench", task, prediction, reference, [*CLASSES, reference]) <= 1.0
    assert 0.0 <= score("needle", "book", prediction, reference) <= 1.0


@pytest.mark.parametrize(("benchmark", "task"), ALL_TASKS)
def test_the_right_answer_scores_1_and_none_scores_0(benchmark, task):
    references = references_of(benchmark, task)
    if task == "kv_retrieval":
        references = "b081349c-0a38"  # one word
    answers = references if isinstance(references, list) else [references]
    right = " ".join(answers) if benchmark == "ruler" else EXACT.get(task, str(answers[0]))
    assert score(benchmark, task, right, references, CLASSES) == pytest.approx(1.0, abs=1e-6)
    assert score(benchmark, task, "", references, CLASSES) == 0.0


@pytest.mark.parametrize(
    ("benchmark", "task", "prediction", "references", "expected"),
    [
        # jieba cuts 北京/是/中国/的/首都 and 中国/的/首都: 3 words shared, 5 and 3 in all.
        ("longbench", "multifieldqa_zh", "北京是中国的首都。", ["中国的首都"], 2 * 3 / 8),
        ("longbench", "multifieldqa_zh", "北京\uff01", ["上海", "北京"], 1.0),
        # The bracket U+300A is not among the punctuation that is dropped: 《/红楼梦 against 红楼梦.
        ("longbench", "multifieldqa_zh", "《红楼梦》", ["红楼梦"], 2 * 1 / 3),
        ("longbench", "dureader", "北京是中国的首都", ["中国的首都"], 2 * 3 / 8),
        # 中国/的/首都北京: the last is one word, so 2 are shared.
        ("longbench", "dureader", "中国的首都北京", ["上海", "中国的首都"], 2 * 2 / 6),
        ("longbench", "vcsum", "中国的首都", "北京是中国的首都", 2 * 3 / 8),
        ("longbench", "vcsum", "", ["北京"], 0.0),
        # 农业 is dropped as a part of the right class; alone it is right, and 2 classes named halve the score.
        ("longbench", "lsht", "农业科技", ["农业科技"], 1.0),
        ("longbench", "lsht", "\n农业\n体育", ["农业"], 1.0),
        ("longbench", "lsht", "农业和体育", ["体育"], 0.5),
        ("longbench", "passage_retrieval_zh", "段落7", ["段落7"], 1.0),
        ("longbench", "passage_retrieval_zh", "是段落7\uff0c不是段落17或27", ["段落7"], 1 / 3),
        ("longbench", "passage_retrieval_zh", "段落七", ["段落7"], 0.0),
        # 3 of 4 characters and 3 of 3.
        ("infinitebench", "longbook_qa_chn", "林 黛玉\uff0c笑", ["林黛玉"], 2 * 3 / 7),
        ("infinitebench", "longbook_qa_chn", "玉", ["宝玉", "黛玉笑"], 2 * 1 / 3),
    ],
)
def test_chinese_tasks(benchmark, task, prediction, references, expected):
    classes = ["体育", "农业", "农业科技"]
    assert score(benchmark, task, prediction, references, classes) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("prediction", "label", "expected"),
    [("12.5", 12, 0.0), ("12.5", [12.5], 1.0), ("12.0", 12, 1.0), ("12", 12.0, 1.0), ("about 12, or 13", 12, 1.0)],
)
def test_math_find_compares_values(prediction, label, expected):
    assert score("infinitebench", "math_find", prediction, label) == expected


@pytest.mark.parametrize("task", ["math_find", "math_calc", "code_run"])
def test_numbers_of_any_length_are_no_error(task):
    digits = "9" * 5000  # longer than Python converts to int
    assert score("infinitebench", task, digits, [1]) == 0.0


@pytest.mark.parametrize(
    ("task", "prediction", "references", "expected"),
    [
        ("code_run", "f(3) == -4", -4, 1.0),
        ("code_run", "-4 it is", -4, 0.0),
        ("math_calc", "3 14 99 15", [[3, 14, 15, 9]], 0.5),  # the data nest the list
        ("code_debug", "The answer is:", ["parse_args", "B"], 0.0),
        ("code_debug", "answer is: A, or is: B", ["parse_args", "B"], 0.0),
        ("code_debug", "I say **option** B", ["parse_args", "B"], 0.0),
        ("longbook_choice_eng", "I think CD", ["Paris", "C"], 0.0),
        ("longbook_choice_eng", "it must be (C) or C", ["Paris", "C"], 1.0),
        ("longbook_choice_eng", "my answer is: Paris", ["Paris", "C"], 1.0),
        ("longbook_choice_eng", "my answer is", ["Paris", "C"], 0.0),
        ("number_string", "x0011 988", "0011", 1.0),
        ("kv_retrieval", 'value: "ab-1".', ["ab-1"], 1.0),
        ("longbook_sum_eng", "the cat\nsat", ["a dog", "the cat sat"], 1.0),
    ],
)
def test_infinitebench_by_hand(task, prediction, references, expected):
    assert score("infinitebench", task, prediction, references) == pytest.approx(expected)


def test_only_the_first_line_counts_where_longbench_cuts():
    assert score("longbench", "triviaqa", "\n\nParis\nLondon Rome", ["Paris"]) == 1.0
    assert score("longbench", "hotpotqa", "\n\nParis\nLondon Rome", ["Paris"]) == 0.5


def test_a_class_after_a_dropped_one_stays_as_in_the_official_loop():
    # Both A and B are parts of the right name; dropping A leaves B unchecked.
    assert score("longbench", "trec", "A B C", ["A B C"], ["A", "B", "A B C"]) == 0.5


def test_sentences_beyond_the_recursion_limit_score_0_as_officially_at_once():
    long_sentence = " ".join(f"word{i}" for i in range(20_000))
    assert score("longbench", "gov_report", long_sentence, [long_sentence]) == 0.0
    assert score("longbench", "gov_report", long_sentence, ["word1 word2"]) < 0.001
    by_sentences = ". ".join(" ".join(f"w{i}x{j}" for j in range(20)) for i in range(60))  # 1,200 words
    assert score("longbench", "gov_report", by_sentences, [by_sentences]) == pytest.approx(1.0)


def test_rouge_does_not_depend_on_the_callers_stack():
    text = " ".join(f"word{i}" for i in range(700))

    def from_depth(depth: int) -> float:
        return from_depth(depth - 1) if depth else score("longbench", "qmsum", text, [text])

    assert from_depth(500) == from_depth(0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("prediction", "references", "expected"),
    [
        ("Eat a SANDWICH, sit in Dolores Park!", "eat the sandwich in the park", 1.0),
        ("sandwich", "a sandwich, the sandwich in a park", 1 / 3),
        ("sandwich", ["park", "sandwich"], 1.0),
        ("anything", "the ...", 0.0),
    ],
)
def test_needle_counts_words(prediction, references, expected):
    assert score("needle", "essay", prediction, references) == pytest.approx(expected)


def test_passkey_stands_in_the_prediction():
    assert score("passkey", "filler", "it is 71432.", 71432) == 1.0
    assert score("passkey", "book", "it is 7143 2", "71432") == 0.0


@pytest.mark.parametrize("task", ["qasper", "trec", "lcc"])
def test_longbench_scores_an_answer_without_references_as_0(task):
    assert score("longbench", task, "x", []) == score("longbench_e", task, "x", []) == 0.0
    assert set((named_scores("longbench", task, "x", []) or {"none": 0.0}).values()) == {0.0}


@pytest.mark.parametrize(
    ("reference", "prediction", "expected"),
    [(3, "3.9", 1.0), (3.0, "3.9", 0.0), (1e-05, "0.00001", 1.0), (1e22, "10000000000000000000000", 1.0)],
)
def test_scbench_compares_with_a_float_exactly_and_with_an_int_by_the_whole_part(reference, prediction, expected):
    assert score("scbench", "mf", prediction, reference) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("longbench", "qaspr", "", ""), r"longbench has no task='qaspr'; allowed are narrativeqa, qasper,"),
        (
            ("longbenchs", "qasper", "", ""),
            r"benchmark='longbenchs'.*allowed are longbench, longbench_e,",
        ),
        (("longbench", "trec", "Food", ["Food"]), r"longbench/trec: all_classes"),
        (("longbench", "passage_retrieval_en", "7", ["7"]), r"'7' is not allowed .* form 'Paragraph N'"),
        (("infinitebench", "passkey", "x", []), r"references=\[\] has no answer"),
        (("longbench", "qasper", "x", [None]), r"reference None is of type NoneType; allowed are str"),
        (("infinitebench", "math_calc", "1", ["one"]), r"reference 'one' is not allowed for this task: only a number"),
        (("infinitebench", "code_debug", "A", ["f"]), r"references=\['f'\] must be the function's name and"),
    ],
)
def test_errors_name_unscorable_values(arguments, message):
    with pytest.raises(EvalError, match=message):
        score(*arguments)


def test_tasks_of_an_unknown_benchmark():
    with pytest.raises(EvalError, match=r"benchmark='glue'.*allowed are longbench"):
        tasks("glue")
