"""The harness's pages against the code: commands parse, names and settings exist, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main

from eval.benchmarks import BENCHMARKS
from eval.budget import Target
from eval.budget_command import make_target
from eval.cli import app
from eval.config import RunConfig, make_config
from eval.costs import Reads
from eval.knobs import BUDGET, KNOBS, Ladders
from eval.lossless_config import LosslessConfig
from eval.metrics import tasks as scored_tasks
from eval.protocols import _SOURCES
from eval.records import MEASURED
from eval.run_check import find_benchmark
from eval.speed import SpeedConfig
from eval.speed_shapes import SHAPES
from eval.store import read_records
from eval.tables import CONFIGS, config_names, read_paper_file, read_table
from eval.throughput import ThroughputConfig
from hf_sparse_attn import METHODS
from hf_sparse_attn.cli.terminal import parse_settings

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "eval/README.md"
BENCHMARK_PAGES = {name: ROOT / f"eval/docs/{name}.md" for name in BENCHMARKS}
COMMAND_PAGES = tuple(ROOT / f"eval/docs/{name}.md" for name in ("budget", "throughput", "lossless"))
PAGES = (README, *BENCHMARK_PAGES.values(), *COMMAND_PAGES)

_FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_MODULE = "-m eval "
COMMAND_LINE: Any = typer.main.get_command(app)


def commands_of(page: Path) -> Iterator[list[str]]:
    """Return the arguments of every call of the harness in a page's code blocks, with continued lines joined."""
    for block in _FENCE.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith(("python -m eval", "accelerate launch")):
                yield shlex.split(line.partition(_MODULE)[2], comments=True)


COMMANDS = [pytest.param(words, id=f"{page.stem}: {' '.join(words)}") for page in PAGES for words in commands_of(page)]


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Parse a command's name and parameters as the command line does, without running it."""
    assert words[0] in COMMAND_LINE.commands, f"there is no command {words[0]}"
    with COMMAND_LINE.commands[words[0]].make_context(words[0], words[1:]) as context:
        return words[0], dict(context.params)


def items(text: str | None) -> list[str]:
    return text.split(",") if text else []


def numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in items(text))


def heading_anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table_column(page: Path, section: str) -> set[str]:
    """Return everything in code marks in the first column of a section's tables."""
    text = page.read_text(encoding="utf-8")
    body = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    first_cells = re.findall(r"^\| (.+?) \|", body, re.MULTILINE)
    return {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}


def test_pages_have_commands_of_every_kind() -> None:
    found = {words[0] for page in PAGES for words in commands_of(page)}
    assert found >= {"list", "run", "report", "table", "speed", "budget", "throughput", "lossless"}
    for name, page in BENCHMARK_PAGES.items():
        assert any(words[:2] == ["run", name] for words in commands_of(page)), f"{page} has no run of {name}"


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_parse_and_name_what_exists(words: list[str]) -> None:
    name, given = parsed(words)
    assert set(items(given.get("method"))) <= set(METHODS)
    if name == "run" and given["config"]:
        assert (ROOT / given["config"]).is_file()
    elif name == "run":
        config = make_config(
            {
                "benchmark": given["benchmark"],
                "model": given["model"],
                "tasks": items(given["tasks"]),
                "token_budget": numbers(given["token_budget"]),
                "lengths": numbers(given["lengths"]),
                "limit": given["limit"],
                "question": given["question"],
                "options": parse_settings("--set", given["settings"] or []),
            }
        )
        find_benchmark(config)
    elif name == "table":
        read_table(given["name"])
    elif name == "speed":
        budgets, contexts = numbers(given["token_budget"]), numbers(given["context"])
        SpeedConfig(model=given["model"], shape=given["shape"], contexts=contexts, token_budget=budgets)
    elif name == "throughput":
        ThroughputConfig(
            given["shape"],
            given["context"],
            given["batch"],
            tuple(items(given["method"])),
            token_budget=numbers(given["token_budget"]),
            rate=given["rate"],
        )
    elif name == "lossless":
        LosslessConfig(
            given["model"],
            given["shape"],
            numbers(given["context"]),
            tuple(items(given["method"])),
            numbers(given["token_budget"]),
            numbers(given["draft_tokens"]),
            new_tokens=given["new_tokens"],
            prompts=given["prompts"],
            data_dir=given["data_dir"],
        )
    elif name == "budget" and given["records"]:
        make_target({}, {name: given[name] for name in ("target", "divergence")})
    elif name == "budget":
        find_benchmark(make_config({"benchmark": given["benchmark"], "model": given["model"]}))
        steps = parse_settings("--steps", given["steps"] or [])
        Ladders(items(given["method"]), parse_settings("--parameter", given["parameter"] or []), steps)
        make_target({}, {name: given[name] for name in ("target", "divergence")} | {"steps": steps})


@pytest.mark.parametrize("words", [["run", "passkey", "--length", "5"], ["speed"], ["runs"]])
def test_a_command_that_does_not_parse_is_seen(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"No such|Missing|no command"):
        parsed(words)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_page_has_all_tasks_and_settings(name: str) -> None:
    benchmark, page = BENCHMARKS[name], BENCHMARK_PAGES[name]
    text = page.read_text(encoding="utf-8")
    sections = ("Data", "Prompts", "Score", "Settings", "Run", "Differences from the original", "Limits")
    assert [section for section in sections if f"\n## {section}\n" not in text] == []
    head = text.split("\n## ")[0]
    assert {task for task in benchmark.tasks if f"`{task}`" not in head} == set()
    if name not in ("pg19", "longanswer"):  # which have no score
        assert set(scored_tasks(name)) == set(benchmark.tasks)
    assert table_column(page, "Settings") == set(benchmark.options)
    settings = text.split("\n## Settings\n")[1].split("\n## ")[0]
    for option, default in benchmark.options.items():
        printed = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        assert f"| `{option}` | `{printed}` |" in settings
    for length in benchmark.default_lengths:
        assert str(length) in text
    for option in benchmark.options:
        assert f"--set {option}=" in text, f"{page} shows no command that sets {option}"
    assert f"](docs/{page.name})" in README.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_relative_links_lead_to_files_and_headings(page: Path) -> None:
    links = [link for link in _LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in heading_anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lines_are_no_longer_than_120_characters(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [number for number, line in enumerate(lines, start=1) if len(line) > 120] == []


def test_readme_names_every_field_of_a_record_and_no_other(tmp_path: Path, model_dir: str) -> None:
    from typer.testing import CliRunner

    out = tmp_path / "out"
    arguments = ["run", "passkey", "--model", model_dir, "--lengths", "300", "--limit", "1", "--out", str(out)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    (record,) = read_records(out / "rows.jsonl")
    documented = table_column(README, "What a record holds")
    assert documented == set(record)
    assert documented >= {*MEASURED, *(field.name for field in fields(Reads))}
    written = {path.name for path in out.iterdir() if path.name != ".lock"}
    assert table_column(README, "A first run") == written


def test_readme_names_every_option_of_run_and_its_setting() -> None:
    run = COMMAND_LINE.commands["run"]
    options = {option for parameter in run.params for option in parameter.opts if option.startswith("--")}
    named = table_column(README, "Commands")
    assert options - {"--help"} == {name for name in named if name.startswith("--")}
    commands = {name.removeprefix("python -m eval ") for name in named if name.startswith("python -m eval ")}
    assert commands == set(COMMAND_LINE.commands)
    text = README.read_text(encoding="utf-8")
    assert {field.name for field in fields(RunConfig) if f"| `{field.name}` |" not in text} == set()


@pytest.mark.parametrize("name", ["budget", "throughput", "lossless"])
def test_a_command_s_page_names_its_own_options(name: str) -> None:
    def options(command: str) -> set[str]:
        parameters = COMMAND_LINE.commands[command].params
        return {option for each in parameters for option in each.opts if option.startswith("--")}

    shared = options("run") if name == "budget" else {"--dtype", "--device"}
    page = ROOT / f"eval/docs/{name}.md"
    section = "Run"
    assert options(name) - shared - {"--help"} == {each for each in table_column(page, section) if each[:2] == "--"}
    assert f"](docs/{name}.md)" in README.read_text(encoding="utf-8")


def test_the_page_of_budgets_names_every_searched_hyperparameter_and_target() -> None:
    page = ROOT / "eval/docs/budget.md"
    searched = {knob.parameter for knob in (BUDGET, *KNOBS.values())}
    assert table_column(page, "What is searched") == searched
    text = page.read_text(encoding="utf-8")
    assert {name for name in KNOBS if f"`{name}`" not in text} == set()
    assert {field.name for field in fields(Target) if f"| `{field.name}` |" not in text} == set()


def test_readme_names_every_paper_table_shape_and_protocol_file() -> None:
    tables = {name: read_paper_file(CONFIGS / f"{name}.yaml") for name in config_names()}
    papers = {name for name, table in tables.items() if table.paper is not None}
    named = table_column(README, "Tables of the papers")
    assert {name for name in named if not name.startswith("--")} == papers
    options = {option for parameter in COMMAND_LINE.commands["table"].params for option in parameter.opts}
    assert {name for name in named if name.startswith("--")} == options - {"name", "--help"}
    text = README.read_text(encoding="utf-8")
    for name in papers:
        figures = re.search(rf"^\| `{name}` \| [^|]* \| (yes|none)", text, re.MULTILINE)
        assert figures is not None
        assert (figures[1] == "yes") == bool(tables[name].figures)
    assert {shape for shape in SHAPES if f"`{shape}`" not in text} == set()
    for name, source in _SOURCES.items():
        row = f"| `{name}` | {source.repository} {source.commit[:7]} |\n"
        assert row in text, f"{README} does not say where {name} comes from"
        assert re.findall(rf"^{name} +(\S+)$", text, re.MULTILINE) == list(source.upstream)
        assert {file for file in source.packed if f"P/{name}/{file}" not in text} == set()
