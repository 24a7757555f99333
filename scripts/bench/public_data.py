"""Where public data lie that are not in this repository: traces of real jobs, lengths of documents."""

from __future__ import annotations

import os
from pathlib import Path


def data_folder() -> Path:
    """The folder ``MEGATRON_BALANCE_DATA``, or ``shared/data`` beside the project."""
    beside = Path(__file__).parents[3] / "shared" / "data"
    return Path(os.environ.get("MEGATRON_BALANCE_DATA") or beside)
