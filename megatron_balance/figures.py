"""Numbers as people read them; a dash for what is none."""

from __future__ import annotations

import math


def percent(share: float, digits: int = 1) -> str:
    """A share."""
    return f"{round(100 * share, digits) + 0.0:.{digits}f} %" if math.isfinite(share) else "-"  # + 0.0: never -0.0


def signed_percent(share: float) -> str:
    """A gain or a loss."""
    return f"{round(100 * share, 1) + 0.0:+.1f} %" if math.isfinite(share) else "-"


def seconds(time_s: float) -> str:
    """Seconds, in the unit that suits them."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if time_s >= size:
            return f"{time_s / size:.4g} {unit}"
    return f"{time_s / 1e-6:.4g} us" if math.isfinite(time_s) else "-"
