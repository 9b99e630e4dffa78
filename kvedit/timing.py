"""Timings. No other module reads a clock or waits for a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime


def clock() -> float:
    """Return seconds on a monotonic clock."""
    return time.perf_counter()


def now() -> str:
    """Return the time in UTC, as ISO 8601 with microseconds; the strings sort by time."""
    return iso(datetime.now(UTC))


def iso(moment: datetime) -> str:
    """Format a time in UTC as `now` does."""
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def waiter(device: str) -> Callable[[], None]:
    """Return a function that waits until a device of that type is idle."""
    import torch

    return {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device, lambda: None)


@dataclass(frozen=True, slots=True)
class Phase:
    """One step of a command.

    Attributes:
        seconds: Duration, including work on the device.
        tokens: Number of tokens processed; `None` if that has no meaning.
    """

    seconds: float
    tokens: int | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second; `None` if unknown."""
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 else None


@dataclass(slots=True)
class Timings:
    """The phases of one command, in the order in which they first ran.

    Attributes:
        synchronize: Waits until the device is idle.
        phases: By name.
    """

    synchronize: Callable[[], None] = lambda: None
    phases: dict[str, Phase] = field(default_factory=dict)

    @contextmanager
    def measure(self, name: str, tokens: int | None = None) -> Iterator[None]:
        """Time a block as the phase `name`; several blocks with one name add up."""
        start = clock()
        try:
            yield
        finally:
            self.synchronize()
            self.add(name, clock() - start, tokens)

    def add(self, name: str, seconds: float, tokens: int | None = None) -> None:
        """Add seconds and tokens to the phase `name`."""
        before = self.phases.get(name, Phase(0.0))
        both = (before.tokens, tokens)
        count = None if both == (None, None) else sum(part or 0 for part in both)
        self.phases[name] = Phase(before.seconds + seconds, count)

    def seconds(self, *names: str) -> float:
        """Return the total seconds of the named phases, or of all phases if none is named."""
        return sum(self.phases[name].seconds for name in names or self.phases if name in self.phases)
