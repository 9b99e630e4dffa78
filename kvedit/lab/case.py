"""A case: a text, an edit, a question, and its right and stale answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvedit.text.document import Edit


@dataclass(frozen=True, slots=True)
class Case:
    """One edit of one text, and a question about the edited text.

    Attributes:
        name: Unique within a run.
        source: Name of the source question; placements and variants of one question share it.
        text: The text before the edit.
        edits: The edit, as sorted, disjoint replacements.
        question: The question as the user asks it.
        answers: Right answers; log-probabilities are those of the first.
        stale: The answer of the text before the edit, if it is a single string.
        opening: Beginning of the answer, which the model is given; may be empty.
        gold: Spans `[start, stop)` of the edited text that contain the evidence, in characters.
        dataset: Whose scoring rules apply; `niah` for generated cases.
        facts: Other properties to split tables by: placement, depth, gap, template.
        max_new_tokens: Maximum number of answer tokens.
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
