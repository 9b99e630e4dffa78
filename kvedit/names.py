"""Names and defaults that a user can type. Imports nothing, so any module can import it."""

from __future__ import annotations

from typing import Literal, get_args

Support = Literal["rows", "window", "units"]
"""How scores become selected rows; see `kvedit.repair.select`."""
SUPPORTS: tuple[Support, ...] = get_args(Support)

Executor = Literal["packed", "interval", "direct", "custom"]
"""How selected rows are recomputed; see `kvedit.repair.refresh`."""
EXECUTORS: tuple[Executor, ...] = get_args(Executor)
AUTO = "auto"
EXECUTOR_NAMES = (AUTO, *EXECUTORS)

DTYPES = ("float32", "bfloat16", "float16")
DTYPE_NAMES = (AUTO, *DTYPES)
DEVICE_NAMES = (AUTO, "cpu", "cuda", "mps", "map")
DECODE_WEIGHTS = ("bf16", "int4")
"""Lower-precision weights that decoding can use."""

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_POLICY = "sur-seam"
DEFAULT_NEW_TOKENS = 256
