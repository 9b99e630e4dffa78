"""`sur`'s token scores with the support `window`: a control of section A.4."""

from __future__ import annotations

from dataclasses import dataclass

from kvedit.names import Support
from kvedit.policies.sur import Sur


@dataclass(frozen=True, slots=True)
class Window(Sur):
    """Score as `Sur` does, and select the best contiguous window."""

    support: Support = "window"
