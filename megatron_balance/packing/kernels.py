"""Compiled code of packing. It calls none of another file: Numba's cache would not notice when that one changes.

There is no clock, no library random number and no fast-math in here: the same data give the same batches everywhere.
"""

from __future__ import annotations

import numba  # noqa: F401
import numpy as np  # noqa: F401

from megatron_balance.kernels import compiled  # noqa: F401

# --- the order of documents


# --- the cut


# --- the placement
