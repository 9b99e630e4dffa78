"""A case: a text, an edit, a question, and what should and should not be answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvedit.text.document import Edit


@dataclass(frozen=True, slots=True)
class Case:
    """One edit of one text, and a question about the text that is left.

    Attributes:
        name: Unique in its run.
        source: Name of the source question; placements and variants of one question share it.
        text: Before the edit.
        edits: What the user does to it.
        question: In the user's words.
        answers: Right answers; the first is the one whose log-probability is taken.
        stale: What the text before the edit would answer, where that is one string.
        opening: How the answer begins; it is given, and what follows is measured. May be empty.
        gold: Spans `[start, stop)` of the edited text that hold the evidence, in characters.
        dataset: Whose normalisation scores the answer; `niah` for those of our own making.
        facts: What else a table may be split by: placement, depth, gap, template.
        max_new_tokens: Of the answer.
    """

    name: str
    source: str
    text: str
    edits: tuple[Edit, ...]
    question: str
    answers: tuple[str, ...]
    stale: str | None = None
    opening: str = ""
    gold: tuple[tuple[int, int], ...] = ()
    dataset: str = "niah"
    facts: dict[str, Any] = field(default_factory=dict)
    max_new_tokens: int = 16
