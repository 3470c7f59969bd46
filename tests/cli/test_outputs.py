"""The HTML page and the heatmap of the tokens read."""

import base64
import errno
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer

from hf_sparse_attn import Quest
from hf_sparse_attn.cli import outputs
from hf_sparse_attn.cli.compare import PasskeyWork, PromptWork
from hf_sparse_attn.cli.models import load_model
from hf_sparse_attn.cli.passkey import make_passkey
from hf_sparse_attn.cli.picture import draw_reads, encode
from hf_sparse_attn.cli.progress import stages
from hf_sparse_attn.cli.reads import Reads, record_reads
from tests.cli.commands import invoke
from tests.tiny import save_model

STARTS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
SMALL = ("--token-budget", "64", "--passkey-tokens", "300", "--depths", "0.5", "--max-new-tokens", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model"), chat=True))


def test_reads_are_those_of_the_first_prompt(model: str) -> None:
    loaded, tokenizer = load_model(model)
    work = PasskeyWork(tokenizer, [make_passkey(tokenizer, 300, 0.5, 0)], [0.5], new_tokens=2)
    method = Quest(token_budget=64)
    with stages() as progress:
        reads = record_reads(loaded, method, "quest", work, progress)
    steps = work.decode_steps
    blocks = -(-(300 + steps) // reads.block_size)
    assert reads.by_step.shape == (steps, blocks)
    assert reads.by_head.shape == (3, blocks)
    assert reads.layers == [0, 1, 2]
    assert reads.by_head[:2].eq(1).all()  # the dense layers
    share = float(reads.by_head[2].nanmean())
    assert 0.1 < share < 0.5
    assert reads.by_step[0].isnan().any()  # tokens that came later
    assert (reads.by_step[-1] >= 2 / 3 - 1e-6).all()


def test_long_prompts_have_larger_blocks(model: str) -> None:
    loaded, tokenizer = load_model(model)
    work = PromptWork(tokenizer, tokenizer("calm sea " * 250)["input_ids"][:900], new_tokens=3)
    with pytest.MonkeyPatch.context() as patch, stages() as progress:
        patch.setattr("hf_sparse_attn.cli.reads.MOST_BLOCKS", 20)
        reads = record_reads(loaded, Quest(token_budget=64), "quest", work, progress)
    assert reads.block_size == 64
    assert reads.by_step.shape == (2, 15)


@pytest.mark.parametrize("suffix", STARTS)
def test_picture_marks_the_needle_and_names_the_method(suffix: str, tmp_path: Path) -> None:
    shares = torch.rand(5, 12)
    shares[0, -1] = torch.nan
    reads = [Reads(name, shares, torch.rand(4, 12), [0, 2], 16) for name in ("quest 64", "$x^{$ [/x]")]
    figure = draw_reads(reads, "a title", range(20, 40))
    panels = [axes for axes in figure.axes if axes.get_xlabel() == "token"]
    assert len(panels) == 4
    for axes in panels:
        assert [line.get_xdata()[0] for line in axes.lines] == [20, 40]
        assert [text.get_text() for text in axes.texts] == ["passkey"]
    assert panels[2].get_title(loc="left").startswith("$x^{$ [/x]")
    assert encode(figure, suffix[1:]).startswith(STARTS[suffix])


def test_compare_writes_a_page_and_a_picture(model: str, tmp_path: Path) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "reads.PNG"
    several = ("--method", "quest,tokenselect")
    result = invoke("compare", "--model", model, *SMALL, *several, "--html", str(page), "--picture", str(picture))
    assert result.exit_code == 0, result.output
    assert "KV cache read" in result.stdout
    html = page.read_text(encoding="utf-8")
    for text in ('<th scope="col">tokenselect</th>', "passkeys found", "page_size=16", "at depth 0.5 of 300 tokens"):
        assert text in html
    assert not re.findall(r"(?:src|href)=\"(?!data:)", html)
    (image,) = re.findall(r"<img src=\"data:image/png;base64,([^\"]+)\"", html)
    assert base64.b64decode(image) == picture.read_bytes()
    assert [line for line in result.stderr.splitlines() if "written" in line] == [
        f"{picture} written",
        f"{page} written",
    ]


def test_an_answer_in_a_page_is_text(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = "<script>alert(1)</script> & \x1b[2J \ud83d"
    measured = PasskeyWork.run
    monkeypatch.setattr(
        "hf_sparse_attn.cli.compare.PasskeyWork.run",
        lambda *arguments: replace(measured(*arguments), answer=hostile),
    )
    page = tmp_path / "page.html"
    result = invoke("compare", "--model", model, *SMALL, "--html", str(page))
    assert result.exit_code == 0, result.output
    html = page.read_text(encoding="utf-8")
    assert "<script" not in html
    assert html.count(r"&lt;script&gt;alert(1)&lt;/script&gt; &amp; \x1b[2J \ud83d") == 2


def test_a_full_disk_leaves_the_former_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(name: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    page = tmp_path / "page.html"
    page.write_bytes(b"former")
    monkeypatch.setattr("hf_sparse_attn.whole_file._flush", full)
    with pytest.raises(typer.Exit):
        outputs._write("--html", page, b"new")
    assert re.search(r"error: --html '.*page\.html' cannot be written: .*No space left", capsys.readouterr().err)
    assert page.read_bytes() == b"former"
    assert list(tmp_path.iterdir()) == [page]


def test_a_file_is_replaced_where_its_folder_takes_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "page.html").write_bytes(b"former")
    (tmp_path / "link.html").symlink_to(folder / "page.html")
    writable = {folder / "page.html", tmp_path / "link.html", tmp_path}
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) in writable)
    assert not outputs.may_be_written(folder / "page.html")
    assert not outputs.may_be_written(tmp_path / "link.html")
    assert outputs.may_be_written(tmp_path / "new.html")
    writable.add(folder)
    assert outputs.may_be_written(folder / "page.html")
    assert outputs.may_be_written(tmp_path / "link.html")
    assert not outputs.may_be_written(folder)


def test_missing_matplotlib_names_the_extra_before_any_work(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    page = tmp_path / "page.html"
    result = invoke("compare", "--model", "./nowhere", "--html", str(page))
    assert result.exit_code == 2
    assert result.stderr.splitlines() == ["error: --html needs matplotlib: pip install 'hf-sparse-attn[cli]'"]
    assert not page.exists()
