"""Files that ``compare`` writes: an HTML page, and a heatmap of the tokens read."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_sparse_attn.cli.extras import install_command
from hf_sparse_attn.cli.page import make_page
from hf_sparse_attn.cli.progress import say, stages
from hf_sparse_attn.cli.reads import record_reads
from hf_sparse_attn.cli.terminal import fail, visible
from hf_sparse_attn.whole_file import write_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_sparse_attn.cli.compare import Work
    from hf_sparse_attn.cli.report import Comparison

FORMATS = ("png", "svg", "pdf")


@dataclass(frozen=True)
class Outputs:
    """Paths of the requested files; None for a file that was not requested."""

    html: Path | None
    picture: Path | None

    @classmethod
    def checked(cls, html: Path | None, picture: Path | None, has_methods: bool) -> Outputs:
        """Check before any work that the files can be written."""
        given = {"--html": html, "--picture": picture}
        for option, path in given.items():
            if path is None:
                continue
            if not has_methods:
                fail(f"{option} shows what sparse methods read, but --method names only dense attention")
            if importlib.util.find_spec("matplotlib") is None:
                fail(f"{option} needs matplotlib: {install_command('cli')}")
            if path.is_dir():
                fail(f"{option} {str(path)!r} is a folder; allowed: a file")
            if not may_be_written(path):
                fail(f"{option} {str(path)!r} cannot be written: no such folder, or no permission")
        if picture is not None and _format(picture) not in FORMATS:
            fail(f"--picture {str(picture)!r} is not supported: its name must end in .{', .'.join(FORMATS)}")
        return cls(html, picture)

    def write(self, model: PreTrainedModel, comparison: Comparison, work: Work) -> None:
        """Run each method on the first prompt again, record its reads, and write the files."""
        if self.html is None and self.picture is None:
            return
        from hf_sparse_attn.cli.picture import draw_reads, encode

        with stages() as progress:
            names = comparison.columns[1:]
            reads = [
                record_reads(model, method, name, work, progress)
                for method, name in zip(comparison.methods, names, strict=True)
            ]
        title = f"Tokens read of {work.drawn}, {comparison.title}"
        figure = draw_reads(reads, visible(title), work.needle)
        png = encode(figure, "png")
        if self.picture is not None:
            file_format = _format(self.picture)
            _write("--picture", self.picture, png if file_format == "png" else encode(figure, file_format))
        if self.html is not None:
            caption = f"Share of each block's tokens read in the decode steps of {work.drawn}."
            _write("--html", self.html, make_page(comparison, png, caption).encode("utf-8"))


def _format(picture: Path) -> str:
    return picture.suffix.removeprefix(".").lower()


def may_be_written(path: Path) -> bool:
    """Return whether a file can be created or replaced, as far as its folder and permissions tell."""
    if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
        return False
    folder = Path(os.path.realpath(path)).parent
    is_special = path.exists() and not path.is_file()  # such as /dev/stdout, whose folder takes no other file
    return is_special or (folder.is_dir() and os.access(folder, os.W_OK))


def _write(option: str, path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        fail(f"{option} {str(path)!r} cannot be written: {error}")
    say(f"{path} written")
