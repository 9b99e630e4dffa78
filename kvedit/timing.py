"""Timings: the only clock, and the only place that waits for a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime


def clock() -> float:
    """Seconds on a clock that never goes back."""
    return time.perf_counter()


def now() -> str:
    """The date and time in UTC, as ISO 8601 to the microsecond; sorts as time does."""
    return iso(datetime.now(UTC))


def iso(moment: datetime) -> str:
    """Write a time in UTC as `now` does."""
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def waiter(device: str) -> Callable[[], None]:
    """Return what waits for a device of that type to have done all it was given."""
    import torch

    return {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device, lambda: None)


@dataclass(frozen=True, slots=True)
class Phase:
    """One step of the work.

    Attributes:
        seconds: Time that it took, the device's work included.
        tokens: Tokens that it handled; `None` where that has no meaning.
    """

    seconds: float
    tokens: int | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second, where both are known."""
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 else None


@dataclass(slots=True)
class Timings:
    """The phases of one command, in the order in which they ran.

    Attributes:
        synchronize: Waits until the device has done what it was given.
        phases: What was measured so far.
    """

    synchronize: Callable[[], None] = lambda: None
    phases: dict[str, Phase] = field(default_factory=dict)

    @contextmanager
    def measure(self, name: str, tokens: int | None = None) -> Iterator[None]:
        """Time a block as the phase `name`; a second block of that name adds to it."""
        start = clock()
        try:
            yield
        finally:
            self.synchronize()
            self.add(name, clock() - start, tokens)

    def add(self, name: str, seconds: float, tokens: int | None = None) -> None:
        """Add seconds, and tokens if any, to the phase `name`."""
        before = self.phases.get(name, Phase(0.0))
        both = (before.tokens, tokens)
        count = None if both == (None, None) else sum(part or 0 for part in both)
        self.phases[name] = Phase(before.seconds + seconds, count)

    def seconds(self, *names: str) -> float:
        """Sum of the seconds of the named phases; of all of them without a name."""
        return sum(self.phases[name].seconds for name in names or self.phases if name in self.phases)
