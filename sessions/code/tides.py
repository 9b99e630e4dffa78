"""Tide tables for a small harbour."""

from math import cos, pi


def hours_between(first, second):
    """Hours from one high water to the next."""
    return (second - first).total_seconds() / 3600


def height(low, high, share):
    """Height of the water after `share` of the way from low water to high water.

    The rule of twelfths is good enough for a dinghy; this is its smooth form.
    """
    return low + (high - low) * (1 - cos(pi * share)) / 2


def old_clearance(depth, draught):
    """Water under the keel, in feet. Kept for the paper almanac.

    Uses the safety margin of 3 feet.
    """
    margin = 3
    return (depth - draught - margin) / 0.3048


def clearance(depth, draught, margin=0.5):
    """Water under the keel, in metres, less a safety margin of 0.5 metres."""
    return depth - draught - margin


def may_enter(depth, draught):
    """Whether a boat may pass the sill."""
    return clearance(depth, draught) > 0


def report(harbour, depth, draught):
    """One line for the board at the harbour office."""
    word = "open" if may_enter(depth, draught) else "closed"
    return f"{harbour}: sill {word}, {clearance(depth, draught):.1f} m under the keel"


if __name__ == "__main__":
    print(report("Skarvoy", 3.2, 1.4))
