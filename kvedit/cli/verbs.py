"""The verbs: each command once. They call the session, and say what it did."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvedit.cli import render
from kvedit.document import LineRange, Source, decode
from kvedit.errors import UsageError
from kvedit.select import Budget
from kvedit.session import Session
from kvedit.store import Home, ModelRecord, Store
from kvedit.timing import Timings, clock, now

if TYPE_CHECKING:
    from kvedit.model import Model

_DEVICES = ("auto", "cpu", "cuda", "mps")
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def load(
    file: str,
    model_name: str,
    session_name: str | None,
    system: str | None,
    device: str,
    dtype: str,
    force: bool,
    as_json: bool,
) -> None:
    """Read a document into a session."""
    _one_of("--device", device, _DEVICES)
    _one_of("--dtype", dtype, _DTYPES)
    data = _read(file)
    text, encoding = decode(data, "Standard input" if file == "-" else file)
    home = Home.default()
    store = home.store(session_name or _name_after(file))
    _check_new(store, force)
    timings = Timings()
    start = clock()
    with render.working("Loading the model") as report:
        from kvedit.model import Model
        from kvedit.model.resolve import resolve

        directory = resolve(model_name, report)
        model = Model.open(directory, device=device, dtype=dtype)
    timings.add("load", clock() - start)
    path = "-" if file == "-" else str(Path(file).resolve())
    source = Source(path, encoding, bom=len(data) > len(text.encode(encoding)))
    record = ModelRecord(
        name=model_name if model_name != str(directory) else str(directory.resolve()),
        directory=str(directory.resolve()),
        dtype=model.dtype_name,
        device=device,
        context_length=model.context_length,
        parts=model.parts,
    )
    with store.lock("load", now()):
        _check_new(store, force)
        with render.prefilling() as progress:
            session = Session.load(
                store, text, source, model, record, system=system, timings=timings, progress=progress
            )
    home.keep_out_of_version_control()
    prefill = timings.phases["prefill"]
    if as_json:
        phases = {name: phase.seconds for name, phase in timings.phases.items()}
        speed = session.manifest.prefill_tokens_per_s
        render.out_json({**asdict(session.status()), "seconds": phases, "prefill_tokens_per_s": speed})
    else:
        render.say(
            f"Loaded {session.document.line_count:,} lines, {len(session.rows):,} tokens in "
            f"{render.seconds(prefill.seconds)} ({prefill.tokens_per_s or 0:,.0f} tokens/s) "
            f"into session '{store.name}'."
        )


def delete(lines: list[str], session_name: str | None, as_json: bool) -> None:
    """Delete lines."""
    ranges = [LineRange.parse(part) for text in lines for part in text.split(",")]
    with _writing(session_name, "delete") as session:
        removal = session.delete(ranges)
    if as_json:
        render.out_json(asdict(removal))
    else:
        render.say(render.removal_text(removal))


def ask(
    question: str,
    budget_text: str | None,
    policy: str,
    executor: str,
    max_new_tokens: int | None,
    temperature: float,
    seed: int,
    keep: bool,
    model_name: str | None,
    session_name: str | None,
    as_json: bool,
) -> None:
    """Answer a question."""
    budget = Budget.default() if budget_text is None else Budget.parse(budget_text)
    if question == "-":
        question = decode(_read("-"), "Standard input")[0].strip()
    if not question.strip():
        raise UsageError("The question is empty.", "Write it in quotes: kvedit ask 'When is it due?'.")
    timings = Timings()
    opened = _writing(session_name, "ask") if keep else _reading(session_name)
    with opened as session:
        start = clock()
        with render.working("Loading the model"):
            from kvedit.ask import check_options

            check_options(policy, executor, max_new_tokens, temperature, seed)
            session.use_model(_session_model(session, model_name))
            session.read_segments()
        timings.add("load", clock() - start)
        with render.repairing() as on_phase:
            answer = session.ask(
                question,
                budget=budget,
                policy=policy,
                executor=executor,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed,
                keep=keep,
                timings=timings,
                on_text=(lambda text: None) if as_json else (lambda text: render.out(text, end="")),
                on_phase=on_phase,
            )
    if as_json:
        render.out_json(render.answer_json(answer, question))
    else:
        render.out("")
        render.show_answer(answer)
    if answer.finish_reason == "interrupted":
        raise typer.Exit(130)


def show(lines: str | None, session_name: str | None, as_json: bool) -> None:
    """Print the document with its line numbers."""
    asked = LineRange.parse(lines) if lines is not None else LineRange(None, None)
    with _reading(session_name) as session:
        document = session.document
    first, last = asked.resolve(document.line_count) if lines or document.line_count else (0, 0)
    numbered = list(enumerate(document.lines(first, last), start=first + 1))
    if as_json:
        render.out_json({"lines": [{"number": number, "text": text} for number, text in numbered]})
        return
    width = len(str(document.line_count))
    for number, text in numbered:
        render.out(f"{number:>{width}}  {text}")


def status(session_name: str | None, as_json: bool) -> None:
    """Say what the session holds."""
    with _reading(session_name) as session:
        held = session.status()
    if as_json:
        render.out_json(render.status_json(held))
    else:
        render.show_status(held)


def models_list(as_json: bool) -> None:
    """List models."""
    from kvedit.model.resolve import ALIASES, find, models_folder

    known: list[dict[str, Any]] = [
        {"name": name, "about": alias.about, "directory": str(found) if (found := find(name)) else None}
        for name, alias in ALIASES.items()
    ]
    known += [
        {"name": path.name, "about": "converted from GGUF", "directory": str(path)}
        for path in sorted(models_folder().glob("[!.]*"))
        if path.is_dir() and path.name not in ALIASES
    ]
    if as_json:
        render.out_json({"models": known})
        return
    for model in known:
        render.out(f"{model['name']}  {model['about']}")
        render.out(
            f"  {model['directory'] or 'not here yet; `kvedit models pull ' + model['name'] + '` gets it'}"
        )


def models_pull(name: str, as_json: bool) -> None:
    """Get a model."""
    with render.working("Looking for the model") as report:
        from kvedit.model.resolve import resolve

        directory = resolve(name, report)
    if as_json:
        render.out_json({"name": name, "directory": str(directory)})
    else:
        render.say(f"The model {name} is in {directory}.")


@contextmanager
def _writing(name: str | None, command: str) -> Iterator[Session]:
    """Open a session and hold its lock."""
    store = _store(name)
    store.read_manifest()  # before the lock, which would make the folder of a session that is not there
    with store.lock(command, now()):
        yield Session.open(store)


@contextmanager
def _reading(name: str | None) -> Iterator[Session]:
    yield Session.open(_store(name))


def _store(name: str | None) -> Store:
    home = Home.default()
    return home.current() if name is None else home.store(name)


def _session_model(session: Session, name: str | None) -> Model:
    """Open the model that the session was loaded with, from where it was or from `name`."""
    from kvedit.model import Model
    from kvedit.model.resolve import resolve

    record = session.manifest.model
    at_load = Path(record.directory)
    directory = at_load if name is None and at_load.is_dir() else resolve(name or record.name)
    return Model.open(directory, device=record.device, dtype=record.dtype)


def _read(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except IsADirectoryError:
        raise UsageError(f"{file} is a folder.", "Give one text file.") from None
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {error.strerror or error}.", "Check the path and its permissions."
        ) from None


def _name_after(file: str) -> str:
    """Name a session after its file: the stem, with what a name cannot hold replaced."""
    stem = "stdin" if file == "-" else Path(file).stem
    return re.sub(r"[^\w.\-]+", "-", stem).strip("-.")[:64] or "document"


def _check_new(store: Store, force: bool) -> None:
    if store.exists() and not force:
        raise UsageError(
            f"There is a session '{store.name}' already.",
            "Give --force to replace it, or --session NAME for another name.",
        )


def _one_of(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{option} cannot be '{value}'.", f"Choose one of {', '.join(choices)}.")
