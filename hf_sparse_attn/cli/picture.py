"""Draw heatmaps of the tokens that methods read, with matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from matplotlib import colormaps, rc_context
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hf_sparse_attn.cli.reads import Reads

_COLOURS = colormaps["Blues"].with_extremes(bad="#eeeeee")
_NEEDLE_COLOUR = "#D55E00"
_SHARE = Normalize(0, 1)
_WIDTH, _HEIGHT = 11.0, 2.7  # inches: width of the figure, height of a method's panels


def draw_reads(reads: Sequence[Reads], title: str, needle: range | None = None) -> Figure:
    """Draw two heatmaps per method, by decode step and by layer and KV head, with tokens on the x axis.

    Parameters
    ----------
    reads : sequence of Reads
        At least one.
    title : str
        Title of the figure.
    needle : range, optional
        Tokens of a passkey, to mark.
    """
    with rc_context({"text.parse_math": False}):  # a model's name may contain dollar signs
        figure = Figure(figsize=(_WIDTH, 0.8 + _HEIGHT * len(reads)), layout="constrained")
        figure.suptitle(title, fontsize=11)
        panels = figure.subplots(len(reads), 2, squeeze=False)
        for (by_step, by_head), method in zip(panels, reads, strict=True):
            steps = len(method.by_step)
            _heatmap(by_step, method.by_step, method, (steps + 0.5, 0.5), needle)
            by_step.set_title(f"{method.name}: mean over layers and KV heads", fontsize=9, loc="left", pad=14)
            by_step.set_ylabel("decode step")
            by_step.yaxis.set_major_locator(MaxNLocator(integer=True))
            _heatmap(by_head, method.by_head, method, (len(method.layers), 0), needle)
            by_head.set_title(f"{method.name}: mean over decode steps", fontsize=9, loc="left", pad=14)
            by_head.set_ylabel("layer (one line per KV head)")
            by_head.yaxis.set_major_locator(MaxNLocator(integer=True))
            by_head.yaxis.set_major_formatter(FuncFormatter(partial(_layer, method.layers)))
        scale = ScalarMappable(_SHARE, _COLOURS)
        bar = figure.colorbar(scale, ax=panels.ravel().tolist(), fraction=0.03, pad=0.01)
        bar.set_label("share of the tokens read")
    return figure


def encode(figure: Figure, file_format: str) -> bytes:
    """Return a figure as the bytes of a png, svg or pdf file."""
    buffer = io.BytesIO()
    metadata: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(file_format, {})
    with rc_context({"text.parse_math": False, "svg.hashsalt": "hf-sparse-attn"}):
        figure.savefig(buffer, format=file_format, dpi=150, metadata=metadata)
    return buffer.getvalue()


def _heatmap(axes: Axes, shares: Any, method: Reads, bottom_and_top: tuple[float, float], needle: range | None) -> None:
    tokens = shares.shape[1] * method.block_size
    extent = (0, tokens, *bottom_and_top)
    axes.imshow(shares.numpy(), aspect="auto", extent=extent, cmap=_COLOURS, norm=_SHARE, interpolation="nearest")
    axes.set_xlabel("token")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda token, _: f"{token:,.0f}"))
    if needle is not None:
        for edge in (needle.start, needle.stop):
            axes.axvline(edge, color=_NEEDLE_COLOUR, linewidth=0.8)
        axes.annotate(
            "passkey",
            ((needle.start + needle.stop) / 2, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 1),
            textcoords="offset points",
            ha="center",
            va="bottom",
            color=_NEEDLE_COLOUR,
            fontsize=8,
        )


def _layer(layers: Sequence[int], place: float, _: int | None = None) -> str:
    """Label the tick at the upper edge of a layer's lines."""
    return str(layers[int(place)]) if 0 <= place < len(layers) else ""
