"""Read and check what a session records: tokenizer, rows and ids of a revision, model, source file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvedit.cache.rows import RowTable
from kvedit.errors import ModelError, SessionError, UsageError
from kvedit.store.files import damaged
from kvedit.store.journal import Journal
from kvedit.store.records import Manifest, ModelRecord, Revision
from kvedit.text.document import Document
from kvedit.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvedit.model.model import Model

IntArray = npt.NDArray[np.int64]


@lru_cache(maxsize=2)
def tokenizer_of(serialized: str) -> Tokenizer:
    """Return a tokenizer from its JSON, shared within a process. Raises `SessionError`."""
    try:
        return Tokenizer(serialized)
    except Exception:  # the library raises nothing more specific
        raise damaged("the tokenizer", "is invalid") from None


def unrolled(revision: Revision, expected: int) -> RowTable:
    """Return the rows of a revision with `expected` tokens; counts them before allocating memory.

    Raises:
        SessionError: The number of rows differs, or rows before the frontier are missing.
    """
    total, frontier = sum(piece.length for piece in revision.rows), revision.entry.frontier
    if total != expected:
        raise SessionError(
            f"The session is damaged: it has {total} rows for {expected} tokens.",
            "Load the document again with `kvedit load FILE --force`.",
        )
    rows = RowTable.from_pieces(revision.rows, frontier)
    if frontier > total or rows.missing[:frontier].any():
        raise damaged(f"revision {revision.entry.number}", "has missing rows before its frontier")
    return rows


def join_ids(head: Sequence[int], body: IntArray, turns: Sequence[int] = ()) -> IntArray:
    """Return the ids of head, document and conversation, `int64 [T]`."""
    return np.concatenate([np.array(head, dtype=np.int64), body, np.array(turns, dtype=np.int64)])


def read_ids(
    journal: Journal, number: int, tokenizer: Tokenizer, head: Sequence[int], vocabulary: int | None
) -> IntArray:
    """Return the ids of all rows of a revision, `int64 [N]`.

    Args:
        journal: Has the revision.
        number: Of the revision.
        tokenizer: Encodes its text.
        head: Ids before the document.
        vocabulary: Size of the model's vocabulary, if the model is open.

    Raises:
        SessionError: The revision is damaged.
    """
    revision = journal.revision(number)
    ids = join_ids(head, tokenizer.encode_text(revision.text).ids, revision.turns)
    check_ids(ids, vocabulary)
    unrolled(revision, len(ids))
    return ids


def check_ids(ids: Sequence[int] | IntArray, vocabulary: int | None) -> None:
    """Raise `SessionError` if a token id is outside the model's vocabulary, if that is known."""
    if vocabulary is not None and len(ids) and int(np.max(ids)) >= vocabulary:
        raise damaged("a token id", "is outside the model's vocabulary")


def check_same_model(record: ModelRecord, model: Model) -> None:
    """Raise `SessionError` if a model is not the recorded one; name the part that differs."""
    if part := record.differs_from(model.parts):
        verb = "differ" if part == "weights" else "differs"
        raise SessionError(
            f"This session was created with a different model (the {part.replace('_', ' ')} {verb}).",
            f"Use the original '{record.name}', or load the document again with `kvedit load FILE --force`.",
        )


def open_recorded_model(record: ModelRecord, name: str | None, report: Callable[[str], None]) -> Model:
    """Open the model that a session was created with.

    Args:
        record: The session's record of it.
        name: Where to find it instead: alias, folder, `.gguf` file or hub id.
        report: Called with each step of finding it.

    Raises:
        ModelError: It cannot be found or opened.
    """
    from kvedit.checkpoint.opening import open_model
    from kvedit.checkpoint.resolve import resolve

    recorded = Path(record.directory)
    usable = name is None and recorded.is_absolute() and os.path.isdir(recorded)
    try:
        directory = recorded if usable else resolve(name or record.name, report)
    except (OSError, RuntimeError, ValueError) as error:  # a name too long for a path, an unknown ~user
        raise ModelError(
            f"Cannot look for the model '{name or record.name}': "
            f"{getattr(error, 'strerror', None) or error}.",
            "Use --model to name its folder.",
        ) from None
    # It was admitted at load, but library versions may have changed since.
    return open_model(directory, device=record.device, dtype=record.dtype)


def source_document(manifest: Manifest, encoding: str | None) -> Document:
    """Read the file that a session was loaded from.

    Args:
        manifest: The session's manifest.
        encoding: The encoding named at load, if any.

    Raises:
        UsageError: The file is missing, not a plain file, or not text.
    """
    path = manifest.source
    if path == "-":
        raise UsageError(
            "The session was loaded from standard input, not from a file.",
            "Use `kvedit edit`, or load a file.",
        )
    if os.path.exists(path) and not os.path.isfile(path):
        # The session may come from a stranger: reading a pipe can block, and some devices never end.
        raise UsageError(f"{path} is not a plain file.", "Load the document from a file.")
    return Document.read(path, encoding)
