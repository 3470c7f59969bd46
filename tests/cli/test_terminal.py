"""Text and progress, on a terminal and elsewhere."""

import io

import pytest
from rich.console import Console
from tqdm import tqdm

from hf_sparse_attn.cli.progress import about, moves_cursor, stages, waiting
from hf_sparse_attn.cli.terminal import literal, one_line, visible


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", ["terminal", "no colour", "dumb", "pipe", "pipe with forced colours"])
def test_terminals_get_a_bar_and_other_outputs_a_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TERM", "dumb" if kind == "dumb" else "xterm")
    if kind == "no colour":
        monkeypatch.setenv("NO_COLOR", "1")
    if "forced" in kind:
        monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO() if "pipe" in kind else Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    with waiting("loading [/x]"):
        for _ in tqdm(range(3)):
            pass
    with stages() as progress:
        for name in ("dense", "quest [/x]"):
            with progress.stage(name, 2, "passkey") as (on_step, on_prompt):
                for _ in range(2):
                    on_step()
                    on_prompt()
    written = stream.getvalue()
    assert ("\x1b[" in written) == (kind in ("terminal", "no colour"))
    if kind in ("terminal", "no colour"):
        assert "2/2" in written
        assert "2 forward passes" in written
        assert ("\x1b[38" in written or "\x1b[1;3" in written or "\x1b[3" in written) == (kind == "terminal")
        return
    assert [line.partition(" in ")[0] for line in written.splitlines()] == [
        "dense: 2 passkeys",
        "quest [/x]: 2 passkeys",
    ]
    assert not [char for char in written if char != "\n" and not char.isprintable()]


def test_libraries_draw_their_bars_again_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no model"), waiting("loading"):
        raise ValueError("no model")
    for _ in tqdm(range(3)):
        pass
    assert "3/3" in capsys.readouterr().err


def test_a_file_is_not_a_terminal() -> None:
    assert not moves_cursor(Console(file=io.StringIO(), force_terminal=True))
    assert moves_cursor(Console(file=Terminal(), force_terminal=True))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "1 s"),
        (7.4, "7 s"),
        (9.6, "10 s"),
        (44, "40 s"),
        (89, "90 s"),
        (95, "2 min"),
        (560, "9 min"),
        (580, "10 min"),
        (3600, "60 min"),
        (5500, "1.5 h"),
        (40_000, "11 h"),
    ],
)
def test_times_in_words(seconds: float, words: str) -> None:
    assert about(seconds) == f"about {words}"


def test_control_characters_become_escapes() -> None:
    assert visible("a\tb\nc é 漢 👩\u200d🚀") == "a\tb\nc é 漢 👩\u200d🚀"
    assert visible("\x00\x7f\x85\u2028\u2066") == r"\x00\x7f\x85\u2028\u2066"
    assert one_line("first\n  second\x1b") == r"first second\x1b"
    assert literal("[red]x").plain == "[red]x"
