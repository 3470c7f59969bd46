"""PrefixQA: its data, its prompts, and runs in which all questions share one prepared context."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from eval import metrics
from eval.benchmarks import Setup
from eval.benchmarks.prefixqa import MAX_NEW_TOKENS, PrefixQA, read_contexts
from eval.cli import app
from eval.config import make_config
from eval.engine import Engine, make_variants
from eval.errors import EvalError
from eval.prefixqa_data import longbench_contexts, make_prefixqa, squad_contexts
from eval.processes import Processes
from eval.runner import run
from eval.session import by_material
from eval.store import read_records, record_key
from hf_sparse_attn import KeyCodes, SparseCache, Squeezed, sparse_attention, sparse_attention_stats
from hf_sparse_attn.cli.greedy import answer, end_of_sequence_ids, prefill
from hf_sparse_attn.cli.models import load_model
from tests.eval.tokenizers import tiny_tokenizer

FACTS = [("Where is the harbour?", ["Vigo"]), ("Who keeps the lamp?", ["Ines", "Ines Rey"]), ("When?", ["at noon"])]
CONTEXTS = [" ".join(f"On day {day} boat {day * 7 % 31} left {port}." for day in range(20)) for port in ("Vigo", "Rio")]
TOKENSELECT = {"tokenselect.k": 24, "tokenselect.n_init": 4, "tokenselect.n_local": 12, "tokenselect.chunk_size": 64}
SQUEEZED = {"squeezed.target_sparsity": [0.5, 0.9], "squeezed.levels": 2, "squeezed.window": 32}
METHODS_ALL = {"method": ["quest", "tokenselect"], "parameters": {"quest.token_budget": 64, **TOKENSELECT}}
SQUEEZED_TOO = {
    "method": ["quest", "tokenselect", "squeezed"],
    "parameters": {**METHODS_ALL["parameters"], **SQUEEZED},  # type: ignore[dict-item]
}


def row(context: str, facts: list[tuple[str, list[str]]]) -> dict[str, Any]:
    return {"context": context, "questions": [{"question": asked, "answers": right} for asked, right in facts]}


def write_rows(folder: Path, *rows: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [each if isinstance(each, str) else json.dumps(each) for each in rows]
    (folder / "prefixqa.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def qa_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two contexts: three questions on the first, two on the second."""
    folder = tmp_path_factory.mktemp("prefixqa")
    return write_rows(folder, row(CONTEXTS[0], FACTS), row(CONTEXTS[1], FACTS[:2]))


@pytest.fixture(scope="module")
def loaded(model_dir: str) -> Loaded:
    """A random model in float64, in which the methods' answers do not depend on rounding."""
    return Loaded(*load_model(model_dir, torch.float64, "cpu"))


class Loaded(NamedTuple):
    """A source of a loaded model."""

    model: Any
    tokenizer: Any

    def describe(self, config: Any) -> Any:
        return self.tokenizer, self.model.config

    def load(self, config: Any) -> Any:
        return self.model


def go(out: Path, loaded: Loaded, qa_dir: Path, **values: Any) -> dict[str, Any]:
    config = make_config({"benchmark": "prefixqa", "model": "tiny", "data_dir": str(qa_dir), **METHODS_ALL, **values})
    return run(config, out, loaded, Processes())


def setup_of(qa_dir: Path | None, **values: Any) -> Setup:
    return Setup(
        **{"tokenizer": tiny_tokenizer(), "max_positions": 4000, "data_dir": qa_dir, "tasks": ("qa",), **values}
    )


def test_items_are_the_questions_of_each_context_in_order(qa_dir: Path) -> None:
    items = PrefixQA().items(setup_of(qa_dir))
    assert [(item.sample_id, item.material) for item in items] == [
        *(("0-0", "0"), ("0-1", "0"), ("0-2", "0")),
        *(("1-0", "1"), ("1-1", "1")),
    ]
    assert [item.build().references for item in items[:2]] == [["Vigo"], ["Ines", "Ines Rey"]]
    assert [[item.sample_id for item in group] for group in by_material(items)] == [
        ["0-0", "0-1", "0-2"],
        ["1-0", "1-1"],
    ]


def test_limit_and_questions_choose_among_the_questions(qa_dir: Path) -> None:
    def ids(**values: Any) -> list[str]:
        return [item.sample_id for item in PrefixQA().items(setup_of(qa_dir, **values))]

    assert ids(limit=4) == ["0-0", "0-1", "0-2", "1-0"]
    assert ids(options={"questions": 2}) == ["0-0", "0-1", "1-0", "1-1"]
    assert ids(options={"questions": 1}, limit=5) == ["0-0", "1-0"]


def test_questions_are_chosen_evenly(tmp_path: Path) -> None:
    folder = write_rows(tmp_path, row(CONTEXTS[0], [(f"Number {number}?", ["x"]) for number in range(10)]))
    items = PrefixQA().items(setup_of(folder, options={"questions": 4}))
    assert [item.sample_id for item in items] == ["0-0", "0-2", "0-5", "0-7"]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("length", [None, 200])
def test_prompts_of_a_context_share_their_material_and_fit(qa_dir: Path, chat: bool, length: int | None) -> None:
    tokenizer = tiny_tokenizer(chat)
    lengths = () if length is None else (length,)
    setup = setup_of(qa_dir, tokenizer=tokenizer, chat=chat, lengths=lengths)
    for group in by_material(PrefixQA().items(setup)):
        samples = [item.build() for item in group]
        assert len({tuple(sample.material_ids) for sample in samples}) == 1
        longest = max(len(sample.material_ids) + len(sample.question_ids) for sample in samples)
        if length is not None:
            assert length - MAX_NEW_TOKENS - 4 <= longest <= length - MAX_NEW_TOKENS
        text = tokenizer.decode(samples[0].material_ids)
        assert (CONTEXTS[int(group[0].material or 0)] in text) == (length is None)
        assert "Where is the harbour?" in tokenizer.decode(samples[0].question_ids)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON"),
        ('{"questions": []}', "lacks context"),
        (row("", FACTS), "context is empty"),
        ({"context": "c", "questions": "Who?"}, "questions is of type str, not list"),
        (row("c", []), "questions is empty; at least one"),
        ({"context": "c", "questions": ["Who?"]}, r"question 1 is 'Who\?', not an object with question and answers"),
        ({"context": "c", "questions": [{"question": "Who?"}]}, r"question 1 lacks answers \(it has: question\)"),
        (row("c", [*FACTS, (" ", ["x"])]), "question 4: question=' ' is not allowed"),
        (row("c", [("Who?", [])]), r"question 1: answers=\[\] is not allowed: a list of at least one text"),
        (row("c", [("Who?", "Ines")]), "answers='Ines' is not allowed"),  # type: ignore[list-item]
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path: Path, line: Any, said: str) -> None:
    folder = write_rows(tmp_path, row("fine", FACTS), "", line)
    with pytest.raises(EvalError, match=rf"prefixqa\.jsonl:3.*{said}"):
        read_contexts(folder)


def test_missing_data_and_impossible_settings_are_errors(tmp_path: Path, qa_dir: Path) -> None:
    with pytest.raises(EvalError, match=r"--data-dir is missing.*make-prefixqa"):
        PrefixQA().items(setup_of(None))
    with pytest.raises(EvalError, match=r"looked for .*prefixqa\.jsonl, .*make-prefixqa"):
        PrefixQA().items(setup_of(tmp_path))
    with pytest.raises(EvalError, match="questions=0 is not allowed"):
        PrefixQA().items(setup_of(qa_dir, options={"questions": 0}))
    with pytest.raises(EvalError, match="length=60 is not allowed: at least"):
        PrefixQA().items(setup_of(qa_dir, lengths=(60,)))


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("Ines Rey", 1.0),
        (" the Ines.\nQuestion: Who else?", 1.0),
        ("Ines Rey Mar", 0.8),
        ("\n\nIt is Rey", 0.4),
        ("", 0),
    ],
)
def test_the_score_is_the_best_f1_of_the_first_line(prediction: str, expected: float) -> None:
    assert metrics.score("prefixqa", "qa", prediction, ["Ines", "Ines Rey"]) == pytest.approx(expected)


def squad_file(path: Path, **of_question: Any) -> Path:
    def paragraph(name: str) -> dict[str, Any]:
        answers = [{"text": "noon", "answer_start": 0}] * 2
        asked = {"id": name, "question": f" What of {name}? ", "answers": answers, **of_question}
        nothing = {"id": "n", "question": "What else?", "answers": [], "is_impossible": True}
        return {"context": f"Of {name}.", "qas": [asked, nothing]}

    articles = [{"title": "T", "paragraphs": [paragraph("a"), paragraph("b")]}, {"title": "U", "paragraphs": []}]
    path.write_text(json.dumps({"version": "v2.0", "data": articles}))
    return path


def test_an_article_of_squad_is_the_context_of_its_answerable_questions(tmp_path: Path) -> None:
    (made,) = squad_contexts(squad_file(tmp_path / "dev.json"))
    assert made == {
        "title": "T",
        "context": "Of a.\nOf b.",
        "questions": [{"question": f"What of {name}?", "answers": ["noon"]} for name in "ab"],
    }


def test_rows_of_longbench_with_one_document_are_one_context(tmp_path: Path) -> None:
    rows = [("doc", "First?", ["1"]), ("other", "Second?", "['2', 'two']"), ("doc", "Third?", ["3"])]
    lines = [json.dumps({"context": text, "input": asked, "answers": right}) for text, asked, right in rows]
    path = tmp_path / "qasper.jsonl"
    path.write_text("\n".join(lines))
    assert longbench_contexts(path) == [
        row("doc", [("First?", ["1"]), ("Third?", ["3"])]),
        row("other", [("Second?", ["2", "two"])]),
    ]
    assert make_prefixqa(tmp_path / "prefixqa.jsonl", [path]) == longbench_contexts(path)[:1]
    with pytest.raises(EvalError, match="least_questions=3 questions or more; the most is 2"):
        make_prefixqa(tmp_path / "prefixqa.jsonl", [path], least_questions=3)
    path.write_text(lines[0] + "\n" + json.dumps({"context": "c", "input": "", "answers": ["x"]}))
    with pytest.raises(EvalError, match=r"qasper\.jsonl:2: question 1: question='' is not allowed"):
        longbench_contexts(path)


def test_only_the_longest_contexts_are_kept_in_their_order(tmp_path: Path) -> None:
    texts = ["four", "ten letter", "a", "seven l"]
    path, out = tmp_path / "rows.jsonl", tmp_path / "prefixqa.jsonl"
    path.write_text("\n".join(json.dumps({"context": text, "input": "Q?", "answers": ["x"]}) for text in texts))

    def kept(longest: int | None) -> list[str]:
        return [row["context"] for row in make_prefixqa(out, [path], least_questions=1, longest=longest)]

    assert kept(2) == ["ten letter", "seven l"]
    assert kept(3) == ["four", "ten letter", "seven l"]
    assert kept(9) == kept(None) == texts
    with pytest.raises(EvalError, match="longest=0 is not allowed: at least 1"):
        kept(0)


def test_some_of_a_contexts_questions_are_kept_evenly_spread(tmp_path: Path) -> None:
    path, out = tmp_path / "rows.jsonl", tmp_path / "prefixqa.jsonl"
    asked = [("long", f"{number}?") for number in range(6)] + [("short", "a?"), ("short", "b?")]
    path.write_text("\n".join(json.dumps({"context": of, "input": text, "answers": ["x"]}) for of, text in asked))

    def kept(most: int | None) -> list[list[str]]:
        contexts = make_prefixqa(out, [path], most_questions=most)
        assert [json.loads(line) for line in out.read_text().splitlines()] == contexts
        return [[entry["question"] for entry in context["questions"]] for context in contexts]

    assert kept(3) == [["0?", "2?", "4?"], ["a?", "b?"]]
    assert kept(1) == [["0?"], ["a?"]]
    assert kept(None) == kept(6) == [[f"{number}?" for number in range(6)], ["a?", "b?"]]
    with pytest.raises(EvalError, match="most_questions=0 is not allowed: at least 1"):
        kept(0)


def test_the_command_makes_a_file_that_the_benchmark_reads(tmp_path: Path) -> None:
    out = tmp_path / "data" / "prefixqa.jsonl"
    source, odd = squad_file(tmp_path / "train.json"), squad_file(tmp_path / "odd.json", answers=[{}])
    result = CliRunner().invoke(app, ["make-prefixqa", str(source), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "1 contexts, 2 questions" in result.stdout.replace("\n", " ")
    assert len(PrefixQA().items(setup_of(out.parent))) == 2
    for arguments, said in [
        ([str(source), "--out", str(tmp_path / "other.jsonl")], "a file named prefixqa.jsonl"),
        ([str(tmp_path / "none.json"), "--out", str(out)], "none.json cannot be read"),
        (
            [str(odd), "--out", str(out)],
            "is not in SQuAD's format: KeyError",
        ),
        ([str(tmp_path / "train.csv"), "--out", str(out)], "train.csv is not allowed: a .json file"),
        ([str(source), "--out", str(out), "--longest", "0"], "longest=0 is not allowed"),
    ]:
        refused = CliRunner().invoke(app, ["make-prefixqa", *arguments])
        assert refused.exit_code == 2
        assert said in " ".join(refused.stderr.split())


class Lengths:
    """While entered, the number of tokens of each forward pass over more than one token."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.seen: list[int] = []

    def __enter__(self) -> list[int]:
        def note(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
            if kwargs["input_ids"].shape[1] > 1:
                self.seen.append(kwargs["input_ids"].shape[1])

        self._hook = self._model.register_forward_pre_hook(note, with_kwargs=True)
        return self.seen

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


def materials(loaded: Loaded, qa_dir: Path) -> list[int]:
    items = PrefixQA().items(setup_of(qa_dir, tokenizer=loaded.tokenizer, max_positions=1024, chat=True))
    return [len(group[0].build().material_ids) for group in by_material(items)]


def test_a_context_is_prefilled_once_for_all_questions(tmp_path: Path, loaded: Loaded, qa_dir: Path) -> None:
    first, second = materials(loaded, qa_dir)
    with Lengths(loaded.model) as seen:
        summary = go(tmp_path, loaded, qa_dir)
    # Once for dense attention and Quest, and once for TokenSelect, whose prefill is sparse.
    assert seen == [first, first, second, second]
    assert (summary["rows"], summary["errors"]) == (15, 0)
    records = read_records(tmp_path / "rows.jsonl")
    assert [(record["sample_id"], record["method"]) for record in records[:4]] == [
        *(("0-0", "full"), ("0-0", "quest"), ("0-0", "tokenselect")),
        ("0-1", "full"),
    ]
    for record in records:
        assert record["context_seconds"] >= record["prefill_seconds"] > 0
        assert record["ttft_seconds"] == record["context_seconds"] + record["first_token_seconds"]
    shared = {(record["sample_id"][0], record["method"], record["context_seconds"]) for record in records}
    assert len(shared) == 6
    for entry in summary["table"]:
        assert entry["context_seconds"] > 0
        assert entry["first_token_seconds"] > 0


def test_a_fixed_context_is_clustered_once_for_all_questions(
    tmp_path: Path, loaded: Loaded, qa_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, clustered = Squeezed.cluster, []

    def counting(self: Squeezed, keys: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        clustered.append((self.target_sparsity, keys.shape[1]))
        return stock(self, keys, *arguments, **options)

    monkeypatch.setattr(Squeezed, "cluster", counting)
    first, second = materials(loaded, qa_dir)
    with Lengths(loaded.model) as seen:
        summary = go(tmp_path, loaded, qa_dir, method=["squeezed"], parameters=SQUEEZED)
    assert seen == [first, second]
    layers = loaded.model.config.num_hidden_layers
    assert clustered == [
        (target, length - 32) for length in (first, second) for target in (0.5, 0.9) for _ in range(layers)
    ]
    assert (summary["rows"], summary["errors"]) == (15, 0)
    dense, half, tenth = summary["table"]
    assert [entry["variant"] for entry in (half, tenth)] == ["target_sparsity=0.5", "target_sparsity=0.9"]
    assert dense["realised_budget"] > half["realised_budget"] > tenth["realised_budget"]
    assert half["context_seconds"] > dense["context_seconds"]


def test_forks_of_the_dense_prefill_know_its_mean_query(
    tmp_path: Path, loaded: Loaded, qa_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, known = KeyCodes.decode, []

    def watching(self: KeyCodes, query: Any, layer: Any, *rest: Any) -> Any:
        known.append(bool((layer.metadata["query_centre"] != 0).all()))
        return stock(self, query, layer, *rest)

    monkeypatch.setattr(KeyCodes, "decode", watching)
    parameters = {"keycodes.token_budget": 64, "keycodes.page_size": 16}
    with Lengths(loaded.model) as seen:
        summary = go(tmp_path, loaded, qa_dir, method=["keycodes"], parameters=parameters)
    assert seen == [*materials(loaded, qa_dir)]
    assert (summary["rows"], summary["errors"]) == (10, 0)
    assert known
    assert all(known)


@pytest.mark.parametrize("question", ["decode", "prefill"])
def test_answers_are_those_of_separate_runs(loaded: Loaded, qa_dir: Path, question: str) -> None:
    config = make_config({"benchmark": "prefixqa", "model": "tiny", "question": question, **SQUEEZED_TOO})
    setup = setup_of(qa_dir, tokenizer=loaded.tokenizer, max_positions=1024)
    samples = [item.build() for item in PrefixQA().items(setup)][:3]
    variants = make_variants(config)
    engine = Engine(loaded.model, loaded.tokenizer, config)
    together = {
        (number, variant): measured for number, variant, measured in engine.run([(each, variants) for each in samples])
    }
    answers = set()
    for number, sample in enumerate(samples):
        for _, variant, alone in engine.run([(sample, variants)]):
            shared = together[number, variant]
            assert shared["error"] is alone["error"] is None
            names = ("prediction", "new_tokens", "kv_bytes", "metadata_bytes", "dense_bytes", "realised_budget")
            assert {name: shared[name] for name in names} == {name: alone[name] for name in names}
            answers.add(shared["prediction"])
    assert len(answers) > 3  # answers that were all the same would show nothing


@pytest.mark.parametrize("question", ["decode", "prefill"])
def test_a_fork_of_the_dense_prefill_answers_as_a_patched_model_does(
    loaded: Loaded, qa_dir: Path, question: str
) -> None:
    parameters = SQUEEZED | {"squeezed.target_sparsity": 0.8}
    given = {"benchmark": "prefixqa", "model": "tiny", "method": "squeezed", "parameters": parameters}
    config = make_config({**given, "question": question})
    _, variant = make_variants(config)
    engine = Engine(loaded.model, loaded.tokenizer, config)
    sample = PrefixQA().items(setup_of(qa_dir, tokenizer=loaded.tokenizer, max_positions=1024))[1].build()
    ((_, _, measured),) = engine.run([(replace(sample, stop_at_newline=False), [variant])])
    with sparse_attention(loaded.model, variant.method):
        cache = SparseCache.for_model(loaded.model)
        prefill(loaded.model, cache, sample.material_ids)
        cache.complete_prompt()
        plain = answer(
            loaded.model,
            cache,
            sample.question_ids,
            MAX_NEW_TOKENS,
            token_by_token=question == "decode",
            stop_ids=end_of_sequence_ids(loaded.model, loaded.tokenizer),
            min_new_tokens=1,
        )
        reads = sparse_attention_stats(loaded.model)
    assert measured["prediction"] == loaded.tokenizer.decode(plain.token_ids, skip_special_tokens=True)
    assert 0 < measured["kv_bytes"] == reads.kv_bytes < reads.dense_bytes
    assert measured["metadata_bytes"] == reads.metadata_bytes > 0


def test_dense_answers_are_those_of_generate(loaded: Loaded, qa_dir: Path) -> None:
    config = make_config({"benchmark": "prefixqa", "model": "tiny"})
    setup = setup_of(qa_dir, tokenizer=loaded.tokenizer, max_positions=1024)
    samples = [item.build() for item in PrefixQA().items(setup)]
    engine = Engine(loaded.model, loaded.tokenizer, config)
    newline, *rest = loaded.tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert not rest
    for number, _, measured in engine.run([(sample, make_variants(config)) for sample in samples]):
        sample = samples[number]
        prompt = torch.tensor([[*sample.material_ids, *sample.question_ids]])
        stop = [loaded.model.generation_config.eos_token_id, newline]
        given = loaded.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=MAX_NEW_TOKENS,
            min_new_tokens=1,
            eos_token_id=stop,
            do_sample=False,
        )[0, prompt.shape[1] :].tolist()
        given = given[:-1] if given[-1] in stop else given
        assert measured["prediction"] == loaded.tokenizer.decode(given, skip_special_tokens=True)


def test_a_run_resumes_in_the_middle_of_a_contexts_questions(tmp_path: Path, loaded: Loaded, qa_dir: Path) -> None:
    go(tmp_path, loaded, qa_dir)
    rows = tmp_path / "rows.jsonl"
    lines = rows.read_text(encoding="utf-8").splitlines()
    missing = {("0-1", "quest"), ("0-2", "quest"), ("0-2", "full"), ("1-1", "tokenselect")}
    before = {record_key(record): record for record in read_records(rows)}
    kept = [line for line in lines if (json.loads(line)["sample_id"], json.loads(line)["method"]) not in missing]
    rows.write_text("\n".join(kept) + "\n", encoding="utf-8")
    first, second = materials(loaded, qa_dir)
    with Lengths(loaded.model) as seen:
        summary = go(tmp_path, loaded, qa_dir)
    assert seen == [first, second]
    assert summary["finished"]
    resumed = read_records(rows)
    assert [record_key(record) for record in resumed] == list(before)
    for record in resumed:
        former = before[record_key(record)]
        is_new = (record["sample_id"], record["method"]) in missing
        assert (record == former) == (not is_new)
        assert record["prediction"] == former["prediction"]


def test_a_question_that_fails_takes_no_other_with_it(
    tmp_path: Path, loaded: Loaded, qa_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, calls = Engine._continue, []

    def failing(self: Engine, sample: Any, cache: SparseCache, path: Any) -> Any:
        calls.append(sample)
        if len(calls) == 2:
            self.model(torch.tensor([sample.question_ids]), past_key_values=cache)
            raise MemoryError("out of memory")
        return stock(self, sample, cache, path)

    go(tmp_path / "sound", loaded, qa_dir)
    monkeypatch.setattr(Engine, "_continue", failing)
    summary = go(tmp_path / "failing", loaded, qa_dir)
    sound, found = (read_records(tmp_path / name / "rows.jsonl") for name in ("sound", "failing"))
    assert summary["errors"] == 1
    assert [record["error"] for record in found if record["error"]] == ["MemoryError: out of memory"]
    for expected, record in zip(sound, found, strict=True):
        assert record["error"] or record["prediction"] == expected["prediction"]


def test_a_sweep_over_a_parameter_has_a_record_of_each_value(tmp_path: Path, loaded: Loaded, qa_dir: Path) -> None:
    swept = {"method": ["quest"], "token_budget": [64], "parameters": {"page_size": [8, 16]}, "limit": 2}
    summary = go(tmp_path, loaded, qa_dir, **swept)
    records = read_records(tmp_path / "rows.jsonl")
    assert [(record["variant"], record["parameters"].get("page_size")) for record in records] == 2 * [
        *(("", None), ("page_size=8", 8), ("page_size=16", 16))
    ]
    assert len({record_key(record) for record in records}) == 6
    entries = [(entry["method"], entry["token_budget"], entry["variant"]) for entry in summary["table"]]
    assert sorted(entries[1:]) == [("quest", 64, "page_size=16"), ("quest", 64, "page_size=8")]
    before = (tmp_path / "rows.jsonl").read_bytes()
    go(tmp_path, loaded, qa_dir, **swept)
    assert (tmp_path / "rows.jsonl").read_bytes() == before
    page = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert page.exit_code == 0, page.output
    text = Path(page.stdout.replace("\n", "")).read_text(encoding="utf-8")
    assert "quest (page_size=8) 64" in text
    assert "context (s)" in text
