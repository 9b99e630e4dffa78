"""Two oracles that decide whether a cache is correct, and random edits to test with.

O1, context-free: if no layer sees other rows, a row's keys and values depend only on its token and its
position. So after any edits and a shift, without any refresh, all layers equal a fresh prefill.
O2, full budget: the same keys, values and greedy tokens as loading the edited text.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from rigs.reference import load_session, prefill_states, working_cache

from kvedit.cache.rope import rotate
from kvedit.checkpoint.opening import open_stock
from kvedit.model.model import Model
from kvedit.repair.budget import Budget
from kvedit.session.session import Session

QUESTION = "What is the code of item 7?"
WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa".split()


def a_text(lines: int) -> str:
    """Return different numbered lines, with some blank ones."""
    return "".join(
        f"{number}. The {WORDS[number % 10]} code of item {number} is {number * 37 % 1000}.\n"
        + ("\n" if number % 4 == 0 else "")
        for number in range(1, lines + 1)
    )


def without_context(folder: Path) -> Model:
    """Open a checkpoint with attention outputs of zero, so that no layer sees other rows."""
    stock = open_stock(folder, device="cpu")
    for layer in stock.network.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        if layer.self_attn.o_proj.bias is not None:
            torch.nn.init.zeros_(layer.self_attn.o_proj.bias)
    return stock.model


def by_prefill(session: Session) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rotated keys and values `[L, H, T, D]` of a fresh prefill of the session's ids."""
    model, states = session.model, prefill_states(session.model, session._state.ids)
    cos, sin = model.rope.angles(torch.arange(len(session._state.ids)), model.dtype)
    return rotate(states.keys, cos, sin), states.values


def gap(session: Session, layers: int | None = None) -> float:
    """Return the largest difference between the session's rows on disk and a prefill of its ids."""
    cache, total = working_cache(session), len(session.rows)
    clean = by_prefill(session)
    pairs = zip((cache.keys, cache.values), clean, strict=True)
    return max(float((held[:layers, :, :total] - right[:layers]).abs().max()) for held, right in pairs)


def check_context_free(session: Session) -> None:
    """Check O1 on a session of a model without context: correct ids, and every layer exact at 0 %."""
    session.ask(QUESTION, budget="0", max_new_tokens=1)  # computes only missing rows
    assert not session.rows.missing.any()
    encoded = session._state.tokenizer.encode_text(session.document.text).ids
    assert np.array_equal(
        session._state.ids, [*session._state.manifest.head_ids, *encoded, *session._state.revision.turns]
    )
    assert gap(session) < 1e-5


def check_full_budget(session: Session, home: Path) -> None:
    """Check O2: at a full budget, the same states and greedy tokens as loading the text."""
    answer = session.ask(QUESTION, budget=Budget.full(), max_new_tokens=8)
    fresh = load_session(home, session.model, session.document.text)
    assert session.rows.frontier == len(session.rows)
    assert np.array_equal(session._state.ids[: session._state.document_rows], fresh._state.ids)
    assert gap(session) < 1e-4
    assert answer.ids == fresh.ask(QUESTION, budget="0", max_new_tokens=8).ids


def lines_of(chance: random.Random, count: int, longest: int = 4) -> str:
    """Return a random range of lines of a document of `count` lines."""
    first = chance.randint(1, count)
    return f"{first}-{min(count, first + chance.randrange(longest))}"


def random_step(session: Session, chance: random.Random) -> str:
    """Make a random change that keeps the document at about the same length; return its name."""
    count, entry = session.document.line_count, session._state.revision.entry
    verbs = ["delete", "deletes", "insert", "replace", "move", "ask", "heal"]
    verbs += ["undo"] * bool(entry.edits) + ["redo"] * bool(session._state.manifest.undone)
    verb = chance.choice(verbs) if count > 12 else "insert"
    if verb == "delete":
        session.delete(lines_of(chance, count))
    elif verb == "deletes":
        session.delete(*(lines_of(chance, count, 2) for _ in range(3)))
    elif verb == "insert":
        added = "".join(f"Note {chance.randrange(1000)} by {chance.choice(WORDS)}.\n" for _ in range(3))
        session.insert(added, after=chance.randint(0, count))
    elif verb == "replace":
        text = f"This line of {chance.choice(WORDS)} reads {chance.randrange(1000)}."
        session.replace(lines_of(chance, count), text)
    elif verb == "move":
        first = chance.randint(2, count - 1)
        session.move(f"{first}-{first + 1}", after=chance.randrange(first - 1))
    elif verb == "ask":
        budget = chance.choice(["0", "7t", "20%", "60%"])
        session.ask(QUESTION, budget=budget, max_new_tokens=2)
    elif verb == "heal":
        session.heal(budget=chance.choice(["10%", "50%"]))
    elif verb == "undo":
        session.undo()
    else:
        session.redo()
    return verb


def run_scripts(
    free: Model, whole: Model, home: Path, scripts: int, seed: int, steps: int = 8, lines: int = 24
) -> tuple[int, list[str]]:
    """Run random series of steps, and check each with both oracles.

    Args:
        free: Model without context, for O1, which is checked after every step.
        whole: Model with context, for O2, which is checked at the end of each script.
        home: Folder for the sessions.
        scripts: Number of scripts.
        seed: Seed of the first script; the others get the following numbers.
        steps: Number of steps per script.
        lines: Initial number of lines of each document.

    Returns:
        The number of steps, and the failures: seed, step and error of each.
    """
    done, wrong = 0, list[str]()
    for number in range(seed, seed + scripts):
        for model, name in ((free, "free"), (whole, "whole")):
            chance, verb = random.Random(number), "load"
            session = load_session(home, model, a_text(lines), name)
            try:
                for _ in range(steps):
                    verb = random_step(session, chance)
                    done += 1
                    if model is free and chance.random() < 0.5:  # sometimes several edits to one shift
                        check_context_free(session)
                (
                    check_full_budget(session, home / "fresh")
                    if model is whole
                    else check_context_free(session)
                )
            except AssertionError as error:
                wrong.append(f"seed {number}, {name}, after {verb}: {error}")
    return done, wrong
