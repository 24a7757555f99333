"""What the pictures of all commands share: when they can be drawn, the figure around them, heat maps and titles.

Matplotlib is imported when something is drawn: it takes longer to import than a mistake on the command line may to be told.
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import TYPE_CHECKING

from megatron_balance.errors import BalanceError

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

INK, _FAINT = "#22262e", "#6b7280"
_MOST_TICKS = 12, 10  # across and down


def check_matplotlib(asked: str, instead: str = "") -> None:
    """Refuse a picture that could not be drawn, without the time that importing matplotlib takes.

    Args:
        asked: what needs it, as the user calls it.
        instead: more of a remedy than installing it.

    Raises:
        BalanceError: it is not installed.
    """
    if find_spec("matplotlib") is None:
        install = "pip install 'megatron_balance[timeline]'"
        raise BalanceError(f"{asked} needs matplotlib, which is not installed: {install}{instead}")


def report_figure(height: float, headline: str) -> Figure:
    """The empty figure of a report, ``height`` inches high."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.03, hspace=0.05)
    figure.suptitle(_plain(headline), x=0.012, ha="left", fontsize=15, fontweight="bold", color=INK)
    return figure


def png(figure: Figure) -> bytes:
    """The figure as a file's content."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130, facecolor="white")
    return file.getvalue()


def heat_map(axes: Axes, values: np.ndarray, colours: object, least: float, most: float) -> AxesImage:
    """Draw ``values`` of shape [rows, columns] in colours from those of ``least`` to those of ``most``.

    ``colours`` is a colour map or the name of one.
    """
    from matplotlib.ticker import MaxNLocator

    image = axes.imshow(values, aspect="auto", cmap=colours, vmin=least, vmax=most, interpolation="nearest")
    for axis, size, ticks in zip((axes.xaxis, axes.yaxis), reversed(values.shape), _MOST_TICKS, strict=True):
        axis.set_major_locator(MaxNLocator(min(size, ticks), integer=True, min_n_ticks=1))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return image


def titled(axes: Axes, title: str, below: str = "") -> None:
    """Give a panel its title, a smaller line below it, and the look of all panels."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    axes.set_title(_plain(title) + "\n" * bool(below), loc="left", fontsize=11.5, fontweight="bold", color=INK)
    if below:
        axes.text(0, 1.02, _plain(below), transform=axes.transAxes, fontsize=9.5, color=_FAINT)


def _plain(text: str) -> str:
    """Text in which matplotlib finds no formulas."""
    return text.replace("$", r"\$")
