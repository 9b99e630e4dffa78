"""Arms: named treatments of a shifted cache before the question.

shift                  no refresh: B = 0
replay                 refresh every row of the suffix: B = S
reprefill              a clean prefill of the edited text
erratum                no refresh, but the question says that a passage was removed
POLICY@BUDGET          the policy's scores with its own support: sur@2%
POLICY/SUPPORT@BUDGET     the same scores with another support: infoflow/units@5%
POLICY/SUPPORT+copy@BUDGET  clean rows copied in, not recomputed: the transplant diagnostic
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvedit.errors import UsageError, check_one_of
from kvedit.names import AUTO, SUPPORTS, Support
from kvedit.policies.registry import POLICIES
from kvedit.repair.budget import Budget
from kvedit.repair.options import Options

ENDS = {"shift": "0", "replay": "full", "reprefill": None, "erratum": None}
_FORM = re.compile(r"(?P<policy>[a-z0-9-]+)(?:/(?P<support>[a-z]+))?(?P<copy>\+copy)?@(?P<budget>\S+)")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to prepare a cache for the question.

    Attributes:
        name: As written by the user.
        policy: What scores rows; `None` for arms without a policy.
        support: How scores become rows; `None` for the policy's own, or without a policy.
        budget: How many rows to refresh; `None` for `reprefill` and `erratum`.
        copies: Whether clean rows are copied in instead of recomputed.
    """

    name: str
    policy: str | None = None
    support: Support | None = None
    budget: Budget | None = None
    copies: bool = False

    @classmethod
    def parse(cls, name: str) -> Arm:
        """Parse an arm's name; raises `UsageError` if it is not valid."""
        if name in ENDS:
            end = ENDS[name]
            return cls(name, budget=None if end is None else Budget.parse(end))
        found = _FORM.fullmatch(name)
        if found is None:
            raise UsageError(
                f"'{name}' is not an arm.",
                f"Write POLICY@BUDGET such as sur@2%, POLICY/SUPPORT@BUDGET, or one of {', '.join(ENDS)}.",
            )
        if found["support"] is not None:
            check_one_of("support", found["support"], SUPPORTS)
        support = next((name for name in SUPPORTS if name == found["support"]), None)
        check_one_of("policy", found["policy"], POLICIES)
        budget = Budget.parse(found["budget"])
        return cls(name, found["policy"], support, budget, found["copy"] is not None)

    def options(self, seed: int, executor: str = AUTO) -> Options:
        """Return the equivalent options of `Session.ask`; the arm must have a policy and a budget."""
        assert self.policy is not None
        assert self.budget is not None
        return Options(
            budget=self.budget,
            policy=self.policy,
            support=self.support,
            executor=executor,
            seed=seed,
        )
