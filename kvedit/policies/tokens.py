"""`sur`'s token scores with the support `rows`: a control of section A.4."""

from __future__ import annotations

from dataclasses import dataclass

from kvedit.names import Support
from kvedit.policies.sur import Sur


@dataclass(frozen=True, slots=True)
class Tokens(Sur):
    """Score as `Sur` does, and select isolated rows."""

    support: Support = "rows"
