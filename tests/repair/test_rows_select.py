"""The row table, the budget, and the rows and units that it selects, each compared with obvious loops."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rigs.tiny import tiny_tokenizer

from kvedit.cache.rows import Piece, RowTable, frontier_after, runs
from kvedit.errors import UsageError
from kvedit.policies.scores import Scores
from kvedit.repair.budget import Budget
from kvedit.repair.select import _SUPPORTS, select
from kvedit.text.units import UNIT_CAP, unit_of_rows, unit_starts
from kvedit.tokens.splice import Splice
from kvedit.tokens.tokenizer import Tokenizer

steady = settings(derandomize=True, deadline=None, max_examples=150)
TOKENIZER = Tokenizer(tiny_tokenizer().backend_tokenizer.to_str())
row_sets = st.sets(st.integers(0, 40)).map(sorted)

# --- rows --------------------------------------------------------------------------------------


@st.composite
def tables(draw: st.DrawFn) -> RowTable:
    piece = st.builds(
        Piece, st.sampled_from([None, "s", "t", "u"]), st.integers(0, 9), st.integers(1, 6), st.booleans()
    )
    pieces = [
        Piece(None, 0, part.length) if part.segment is None else part
        for part in draw(st.lists(piece, max_size=8))
    ]
    table = RowTable.from_pieces(pieces, 0)
    # What is before the frontier has a state and is more than refreshed.
    first_open = int(np.argmax(np.append(table.missing | table.refreshed, True)))
    return RowTable.from_pieces(pieces, draw(st.integers(0, first_open)))


def unrolled(pieces: list[Piece]) -> list[tuple[str | None, int, bool]]:
    return [
        (part.segment, part.start + step if part.segment else 0, part.refreshed)
        for part in pieces
        for step in range(part.length)
    ]


@steady
@given(tables())
def test_pieces_and_rows_convert_both_ways(table):
    pieces = table.pieces()
    again = RowTable.from_pieces(pieces, table.frontier)
    assert again.pieces() == pieces
    assert len(again) == len(table) == sum(part.length for part in pieces)
    names = [None if code < 0 else table.segments[code] for code in table.segment]
    by_row = list(zip(names, table.index.tolist(), table.refreshed.tolist(), strict=True))
    assert unrolled(pieces) == by_row
    for one, other in pairwise(pieces):  # they could not be fewer
        joins = one.segment is None or other.start == one.start + one.length
        assert (one.segment, one.refreshed) != (other.segment, other.refreshed) or not joins


@steady
@given(tables())
def test_every_row_is_in_exactly_one_state(table):
    exact = np.arange(len(table)) < table.frontier
    refreshed = table.suffix & ~table.stale
    states = np.stack([exact & ~table.missing, refreshed, table.stale, table.missing])
    assert states.sum(axis=0).tolist() == [1] * len(table)
    for row in range(len(table)):
        assert bool(table.suffix[row]) == (row >= table.frontier and table.segment[row] >= 0)
        assert bool(refreshed[row]) == (bool(table.suffix[row]) and bool(table.refreshed[row]))


@steady
@given(tables(), st.data())
def test_a_splice_moves_rows_and_makes_later_ones_stale(table, data):
    offset = data.draw(st.integers(0, min(2, len(table))))
    body = data.draw(st.integers(0, len(table) - offset))
    kept = sorted(data.draw(st.sets(st.integers(0, max(body - 1, 0)), max_size=body)))
    source = [at for old in kept for at in [-1] * data.draw(st.integers(0, 1)) + [old]]
    unchanged = 0
    while unchanged < len(source) and source[unchanged] == unchanged:
        unchanged += 1
    after = table.splice(Splice(np.array(source, dtype=np.int64), unchanged), offset, body)
    same = unchanged == body == len(source)
    before = unrolled(table.pieces())
    expected = before[:offset]
    for place, old in enumerate(source):
        segment, index, refreshed = before[old + offset] if old >= 0 else (None, 0, False)
        expected.append((segment, index, refreshed and place < unchanged))
    for segment, index, refreshed in before[offset + body :]:  # a conversation moves along
        expected.append((segment, index, refreshed and same))
    assert unrolled(after.pieces()) == expected
    assert after.frontier == (table.frontier if same else min(table.frontier, offset + unchanged))


@steady
@given(tables(), st.data())
def test_computed_rows_use_a_new_segment_and_move_the_frontier(table, data):
    chosen = sorted(data.draw(st.sets(st.integers(0, max(len(table) - 1, 0)), max_size=len(table))))
    after = table.computed(np.array(chosen, dtype=np.int64), "new")
    expected = unrolled(table.pieces())
    for place, row in enumerate(chosen):
        expected[row] = ("new", place, True)
    frontier = table.frontier
    while frontier in chosen:
        frontier += 1
    assert after.frontier == frontier
    expected = [(s, i, flag and row >= frontier) for row, (s, i, flag) in enumerate(expected)]
    assert unrolled(after.pieces()) == expected
    assert frontier_after(table.frontier, np.array(chosen, dtype=np.int64)) == frontier


@steady
@given(row_sets)
def test_runs_are_the_longest_stretches_of_adjacent_rows(rows):
    found = list(runs(rows))
    assert [row for start, stop in found for row in range(start, stop)] == rows
    assert all(a[1] < b[0] for a, b in pairwise(found))
    assert list(runs(np.array(rows, dtype=np.int64))) == found


# --- budget ------------------------------------------------------------------------------------


# 5% of 99 is rounded down: never more than was asked for. 29% of 100 is 28 in binary fractions.
BOUGHT = [("5%", 100, 5), ("5%", 99, 4), ("5%", 19, 0), ("5 %", 100, 5), (" 2.5% ", 999, 24), ("5%", 0, 0)]
BOUGHT += [("0.1%", 999, 0), ("100%", 77, 77), ("0%", 77, 0), ("29%", 100, 29), ("0", 77, 0), ("0t", 77, 0)]
BOUGHT += [("128t", 77, 77), ("128t", 999, 128), ("128 T", 999, 128), ("full", 77, 77), ("FULL", 77, 77)]


@pytest.mark.parametrize(("text", "suffix", "rows"), BOUGHT)
def test_a_budget_is_rounded_down(text, suffix, rows):
    assert Budget.parse(text).resolve(suffix) == rows


NO_BUDGETS = ["-1%", "200%", "100.1%", "abc", "5", "0.05", "nan%", "inf%", "", "%", "t", "1e3t", "-5t"]
NO_BUDGETS += ["1.5t", "5%%", "1e1%", "٥%", "0x5%", "5 percent", "half", "9" * 13 + "t"]
# Python's int refuses more than 4300 digits with an error of its own.
NO_BUDGETS += ["9" * 5000 + "%", "0." + "0" * 5000 + "1%"]


@pytest.mark.parametrize("text", NO_BUDGETS, ids=lambda text: text[:9])
def test_an_invalid_budget_is_refused_with_the_valid_forms(text):
    with pytest.raises(UsageError, match="5%, a number of tokens such as 128t, 0, or full"):
        Budget.parse(text)


@steady
@given(st.integers(0, 10000), st.integers(0, 100000))
def test_a_share_is_exact_and_within_the_suffix(hundredths, suffix):
    budget = Budget.parse(f"{hundredths // 100}.{hundredths % 100:02}%")
    assert budget.resolve(suffix) == int(Fraction(hundredths, 10000) * suffix) <= suffix


def test_the_default_budget_gives_short_documents_more_rows():
    default = Budget.default()
    assert [default.resolve(suffix) for suffix in (0, 10, 64, 1000, 1280, 10000)] == [0, 10, 64, 64, 64, 500]


# --- support -----------------------------------------------------------------------------------


def reference_rows(scores, unit_scores, unit, candidates, width):
    return sorted(sorted(candidates, key=lambda row: (-scores[row], row))[:width])


def reference_window(scores, unit_scores, unit, candidates, width):
    windows = [candidates[first : first + width] for first in range(len(candidates) - width + 1)]
    return max(windows, key=lambda window: (sum(scores[row] for row in window), -window[0]))


def reference_units(scores, unit_scores, unit, candidates, width):
    groups = {number: [row for row in candidates if unit[row] == number] for number in set(unit[candidates])}
    chosen = []
    for number in sorted(groups, key=lambda number: (-unit_scores[number], number)):
        left = width - len(chosen)
        if len(groups[number]) > left:
            return sorted(
                chosen + (reference_window(scores, None, unit, groups[number], left) if left else [])
            )
        chosen += groups[number]
    return sorted(chosen)


REFERENCES = {"rows": reference_rows, "window": reference_window, "units": reference_units}


@st.composite
def markets(draw: st.DrawFn):
    """Scores, unit scores, units, stale and suffix: small whole scores, so that many tie."""
    head = draw(st.integers(0, 2))
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    unit = np.array([-1] * head + [number for number, size in enumerate(sizes) for _ in range(size)])
    whole = st.integers(-2, 3)
    scores = np.array([draw(whole) for _ in unit], dtype=np.float32)
    unit_scores = np.array([draw(whole) for _ in sizes], dtype=np.float32)
    frontier = draw(st.integers(head, len(unit)))
    suffix = np.array([row >= frontier and draw(st.integers(0, 9)) > 0 for row in range(len(unit))])
    stale = suffix & np.array([draw(st.booleans()) for _ in unit])
    return scores, unit_scores, unit, stale, suffix


@pytest.mark.parametrize("rule", list(_SUPPORTS))
@steady
@given(market=markets(), budget=st.integers(0, 50))
def test_a_support_fills_the_budget_with_stale_rows_first(rule, market, budget):
    scores, unit_scores, unit, stale, suffix = market
    support = select(Scores(scores, unit_scores), unit, stale, suffix, min(budget, int(suffix.sum())), rule)
    assert support.dtype == np.int64
    chosen = support.tolist()
    assert len(chosen) == min(budget, int(suffix.sum()))
    assert chosen == sorted(set(chosen))
    assert all(suffix[row] for row in chosen)
    stale_rows, other_rows = np.flatnonzero(stale).tolist(), np.flatnonzero(suffix & ~stale).tolist()
    selected = [row for row in chosen if stale[row]]
    assert len(selected) == min(len(chosen), len(stale_rows))
    expected = []
    for candidates in (stale_rows, other_rows):
        width = min(len(chosen) - len(expected), len(candidates))
        expected += REFERENCES[rule](scores, unit_scores, unit, candidates, width) if width else []
    assert chosen == sorted(expected)
    again = select(Scores(scores.copy(), unit_scores.copy()), unit.copy(), stale, suffix, len(chosen), rule)
    assert again.tolist() == chosen


@pytest.mark.parametrize("rule", list(_SUPPORTS))
def test_ties_go_to_the_earlier_row(rule):
    # Thirds do not add up alike in every order: equal sums must tie all the same.
    scores = np.full(40, 1 / 3, dtype=np.float32)
    unit = np.arange(40) // 4
    every = np.arange(40) >= 8
    chosen = select(Scores(scores, np.full(10, 1 / 3, dtype=np.float32)), unit, every, every, 10, rule)
    assert chosen.tolist() == list(range(8, 18))


def test_windows_with_equal_sums_tie_despite_earlier_scores():
    # The running sum behind the large numbers has no room for all digits of the small ones.
    scores, every = np.array([1e-6, 1e-6, -3000.7] * 6, dtype=np.float32), np.ones(18, dtype=bool)
    one_unit = np.zeros(18, dtype=np.int64)
    assert select(Scores(scores, scores[:1]), one_unit, every, every, 2, "window").tolist() == [0, 1]


def test_units_takes_whole_units_then_a_window_of_the_next():
    unit = np.repeat(np.arange(4), 5)
    scores = np.array([0] * 5 + [0, 1, 3, 3, 0] + [0] * 5 + [9] * 5, dtype=np.float32)
    all_rows = np.ones(20, dtype=bool)
    ranked = np.array([1, 4, 5, 2], dtype=np.float32)
    chosen = select(Scores(scores, ranked), unit, all_rows, all_rows, 8, "units")
    assert chosen.tolist() == [6, 7, 8, *range(10, 15)]
    # Not the best rows of the next unit, but adjacent ones; and never one of a unit ranked lower.
    assert select(Scores(scores, ranked), unit, all_rows, all_rows, 10, "units").tolist() == list(
        range(5, 15)
    )


# --- units -------------------------------------------------------------------------------------


def test_units_end_at_sentences_lines_and_blank_lines():
    text = 'One. "Two!" Three?\nFour 3.5 e.g.x\n\n\n  Five。Six\r\nseven'
    starts = unit_starts(text).tolist()
    parts = [text[a:b] for a, b in pairwise([*starts, len(text)])]
    assert parts == ["One.", ' "Two!"', " Three?\n", "Four 3.5 e.g.x\n\n\n  ", "Five。", "Six\r\n", "seven"]


def test_the_smallest_texts_are_one_unit():
    assert all(unit_starts(text).tolist() == [0] for text in ("", "\n", "\n\n\n", "a", ".", "。", "a\n"))


@steady
@given(
    st.lists(st.sampled_from(["fees ", "paid. ", "\n", "\n\n", "  ", "。", "🙂", "word" * 9]), max_size=40),
    st.integers(1, 9),
)
def test_row_units_are_capped_and_never_split_a_token(words, cap):
    text = "".join(words)
    tokens = TOKENIZER.encode_text(text)
    unit = unit_of_rows(text, tokens.starts, cap).tolist()
    ends = unit_starts(text).tolist()
    by_text = [sum(start >= end for end in ends) for start in tokens.starts]
    expected, number = [], -1
    for row, of_text in enumerate(by_text):
        size, offset = by_text.count(of_text), row - by_text.index(of_text)
        width = -(-size // -(-size // cap))  # equal pieces, as few as the cap allows
        number += offset % width == 0
        expected.append(number)
    assert unit == expected
    assert all(unit.count(number) <= cap for number in set(unit))


def test_a_line_without_a_stop_is_split_into_equal_pieces():
    starts = np.arange(3 * UNIT_CAP + 1)
    sizes = np.bincount(unit_of_rows("x" * len(starts), starts))
    assert sizes.tolist() == [49, 49, 49, 46]
    assert unit_of_rows("", np.zeros(0, dtype=np.int64)).tolist() == []
