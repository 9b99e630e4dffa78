"""Arms: what is done to a shifted cache before the question, by name.

shift                  nothing: B = 0
replay                 every row of the suffix: B = S
reprefill              a clean prefill of the edited text
erratum                nothing, and the question says that a passage was removed
POLICY@BUDGET          the policy's scores with its own support rule: sur@2%
POLICY/RULE@BUDGET     the same scores with another rule: infoflow/units@5%
POLICY/RULE+copy@BUDGET  clean rows copied in, not recomputed: the transplant diagnostic
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvedit.errors import UsageError
from kvedit.policies import Policy, policy_named
from kvedit.select import RULES, Budget, Rule

ENDS = {"shift": "0", "replay": "full", "reprefill": None, "erratum": None}
_FORM = re.compile(r"(?P<policy>[a-z0-9-]+)(?:/(?P<rule>[a-z]+))?(?P<copy>\+copy)?@(?P<budget>\S+)")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to get a cache ready for the question.

    Attributes:
        name: As it was written.
        policy: What ranks rows; `None` for the ends.
        rule: Support rule; `None` for the policy's own, or without a policy.
        budget: What it may refresh; `None` for `reprefill` and `erratum`.
        copies: Clean rows are copied in rather than recomputed.
    """

    name: str
    policy: str | None = None
    rule: Rule | None = None
    budget: Budget | None = None
    copies: bool = False

    @classmethod
    def parse(cls, name: str) -> Arm:
        """Read an arm's name; raises `UsageError` when it is none."""
        if name in ENDS:
            end = ENDS[name]
            return cls(name, budget=None if end is None else Budget.parse(end))
        found = _FORM.fullmatch(name)
        if found is None:
            raise UsageError(
                f"'{name}' is no arm.",
                f"Write POLICY@BUDGET such as sur@2%, POLICY/RULE@BUDGET, or one of {', '.join(ENDS)}.",
            )
        rule = next((rule for rule in RULES if rule == found["rule"]), None)
        if found["rule"] is not None and rule is None:
            raise UsageError(f"There is no support rule '{found['rule']}'.", f"Choose {', '.join(RULES)}.")
        policy_named(found["policy"])
        budget = Budget.parse(found["budget"])
        return cls(name, found["policy"], rule, budget, found["copy"] is not None)

    def make_policy(self) -> Policy | None:
        """Make the policy with its default settings."""
        return None if self.policy is None else policy_named(self.policy)
