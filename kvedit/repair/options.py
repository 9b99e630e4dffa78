"""The options of a question, in one place: names, defaults, checks, and spelling outside Python.

`Session.ask`, `stream` and `explain`, the command line, `set`, completion, JSON and `log --script`
are derived from the fields of `Options`. A new option is a field here plus the code that uses it.
No torch.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Collection
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any

from kvedit.errors import UsageError, check_one_of
from kvedit.names import DECODE_WEIGHTS, DEFAULT_NEW_TOKENS, DEFAULT_POLICY, EXECUTOR_NAMES, SUPPORTS
from kvedit.policies.registry import POLICIES
from kvedit.repair.budget import Budget

_SPELLING = "spelling"


@dataclass(frozen=True, slots=True)
class Spelling:
    """How an option is typed and shown.

    Attributes:
        help: One line for `--help`.
        flags: Option names; derived from the field's name if empty.
        metavar: Placeholder for the value; a flag without a value has none.
        parse: Reads a typed word; raises `UsageError` or `ValueError`.
        choices: All values that are accepted; empty where there are too many to list.
        examples: Values that completion suggests where there are no choices.
        selects: Whether it affects which rows are selected, so that `explain` takes it too.
        setting: Name in `set`, in the REPL; `None` where `set` does not know it.
        negative: Whether the command-line flag stands for the opposite of the field.
    """

    help: str
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    parse: Callable[[str], Any] = str
    choices: Collection[str] = ()
    examples: tuple[str, ...] = ()
    selects: bool = False
    setting: str | None = None
    negative: bool = False


def option(default: Any, help: str, **spelling: Any) -> Any:
    """Return a dataclass field with its spelling; a callable default is a factory."""
    known = {_SPELLING: Spelling(help, **spelling)}
    return (
        field(default_factory=default, metadata=known)
        if callable(default)
        else field(default=default, metadata=known)
    )


def spelling(of: Field[Any]) -> Spelling:
    """Return how a field of `Options` is spelled, its flags filled in."""
    known: Spelling = of.metadata[_SPELLING]
    return known


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to answer a question.

    Attributes:
        budget: How many rows to refresh; also accepts text such as `5%`, or `None` for the default.
        policy: Name in `kvedit.POLICIES`; it scores rows and units.
        support: How scores become selected rows: `rows`, `window` or `units`; the policy's own if `None`.
        executor: How selected rows are recomputed: `auto`, `packed`, `interval`, `direct` or `custom`.
        max_new_tokens: Maximum number of answer tokens; `None`: what the context leaves, up to 256.
        temperature: 0 always chooses the most likely token.
        seed: For sampling and for random policies; 0 to 2^63 - 1.
        decode_weights: `bf16` or `int4`: decode with lower-precision weights; the model's own if `None`.
        conversation: Read and continue the conversation.
        keep: Keep refreshed rows in the session.

    Raises:
        UsageError: A value is not valid, or two exclude each other.
    """

    budget: Budget = option(
        Budget.default,
        "Rows to refresh, of those after the first edit. Default: 5%, at least 64t.",
        flags=("--budget", "-b"),
        metavar="5%|128t|0|full",
        parse=Budget.parse,
        examples=("1%", "2%", "5%", "10%", "64t", "128t", "0", "full"),
        selects=True,
        setting="budget",
    )
    policy: str = option(
        DEFAULT_POLICY,
        f"What ranks rows: {', '.join(POLICIES)}. Default: {DEFAULT_POLICY}.",
        metavar="NAME",
        choices=POLICIES,
        selects=True,
        setting="policy",
    )
    support: str | None = option(
        None,
        f"How scores become rows: {', '.join(SUPPORTS)}. Default: the policy's own.",
        metavar="NAME",
        choices=SUPPORTS,
        selects=True,
    )
    executor: str = option("auto", f"{', '.join(EXECUTOR_NAMES)}.", metavar="NAME", choices=EXECUTOR_NAMES)
    max_new_tokens: int | None = option(
        None,
        f"Tokens of answer at most. Default: {DEFAULT_NEW_TOKENS}, or what fits.",
        metavar="N",
        parse=int,
    )
    temperature: float = option(0.0, "0 takes the likeliest token.", metavar="X", parse=float)
    seed: int = option(0, "For sampling and random policies.", metavar="N", parse=int, selects=True)
    decode_weights: str | None = option(
        None,
        f"Decode with lower-precision weights, on a CPU: {', '.join(DECODE_WEIGHTS)}. Default: the model's.",
        metavar="NAME",
        choices=DECODE_WEIGHTS,
        setting="decode-weights",
    )
    conversation: bool = option(
        False,
        "See the conversation, and continue it.",
        flags=("--continue", "-c"),
        selects=True,
        setting="conversation",
    )
    keep: bool = option(True, "Leave the session as it is.", flags=("--no-keep",), negative=True)

    def __post_init__(self) -> None:
        if not isinstance(self.budget, Budget):
            given: str | None = self.budget
            object.__setattr__(self, "budget", Budget.default() if given is None else Budget.parse(given))
        for each in fields(self):
            value, choices = getattr(self, each.name), spelling(each).choices
            if choices and value is not None:
                check_one_of(each.name.replace("_", " "), value, choices)
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise UsageError("--max-new-tokens must be at least 1.", "Leave it out for the default.")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise UsageError(
                f"The temperature must be 0 or positive, not {self.temperature}.",
                "Use 0 to choose the most likely token.",
            )
        if not 0 <= self.seed < 2**63:
            raise UsageError(
                f"The seed must be an integer from 0 to 2^63 - 1, not {self.seed}.", "Use another seed."
            )
        if self.conversation and not self.keep:
            raise UsageError("--continue and --no-keep cannot be combined.", "Drop one of them.")

    def command(self, question: str) -> str:
        """Return the `ask` command that asks `question` with these options."""
        usual, typed = Options(), list[str]()
        for each in fields(self):
            value = getattr(self, each.name)
            if value != getattr(usual, each.name):
                typed += [flags(each)[0]] if isinstance(value, bool) else [flags(each)[0], as_word(value)]
        asked = shlex.quote(question)
        return " ".join(["ask", *typed, "--", asked] if question.startswith("-") else ["ask", asked, *typed])

    def record(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        return {**asdict(self), "budget": as_word(self.budget)}


def flags(of: Field[Any]) -> tuple[str, ...]:
    """Return the command-line names of a field."""
    return spelling(of).flags or (f"--{of.name.replace('_', '-')}",)


def as_word(value: Any) -> str:
    """Return an option's value as it is typed."""
    return value.text if isinstance(value, Budget) else str(value)
