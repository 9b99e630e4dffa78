"""What a session's state is made of: its tokenizer, the rows of a revision, its model, its source file."""

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
from kvedit.store.records import Manifest, ModelRecord, Revision
from kvedit.text.document import Document
from kvedit.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvedit.model.model import Model

IntArray = npt.NDArray[np.int64]


@lru_cache(maxsize=2)
def tokenizer_of(serialized: str) -> Tokenizer:
    """Return the tokenizer of its JSON; sessions of one process share it. Raises `SessionError`."""
    try:
        return Tokenizer(serialized)
    except Exception:  # whatever the library says of it; the class is not more exact
        raise damaged("the tokenizer", "cannot be understood") from None


def unrolled(revision: Revision, expected: int) -> RowTable:
    """Give the rows of a revision of so many tokens; they are counted before memory is taken for them.

    Raises:
        SessionError: They are more or fewer, or some before the frontier have no state.
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


def check_ids(ids: Sequence[int] | IntArray, model: Model) -> None:
    """Raise `SessionError` if a token id is outside the model's vocabulary."""
    if len(ids) and int(np.max(ids)) >= model.vocabulary:
        raise damaged("a token id", "is none of the model's")


def check_same_model(record: ModelRecord, model: Model) -> None:
    """Raise `SessionError` if a model is not the one of a session's record; names the part that differs."""
    if part := record.differs_from(model.parts):
        raise SessionError(
            f"The session was computed by another model: the {part.replace('_', ' ')} differs.",
            f"Use the model '{record.name}' as it was, or load the document "
            "again with `kvedit load FILE --force`.",
        )


def open_kept_model(record: ModelRecord, name: str | None, report: Callable[[str], None]) -> Model:
    """Open the model that a session names.

    Args:
        record: The session's record of it.
        name: Another place for it: alias, folder, `.gguf` file or hub id.
        report: Called with what is being done to find it.

    Raises:
        ModelError: It cannot be found or opened.
    """
    from kvedit.checkpoint.opening import open_model
    from kvedit.checkpoint.resolve import resolve

    at_load = Path(record.directory)
    known = name is None and at_load.is_absolute() and os.path.isdir(at_load)
    try:
        directory = at_load if known else resolve(name or record.name, report)
    except (OSError, RuntimeError, ValueError) as error:  # too long for a file, a home that nobody has
        raise ModelError(
            f"The model '{name or record.name}' cannot be looked for: "
            f"{getattr(error, 'strerror', None) or error}.",
            "Give its folder with --model.",
        ) from None
    # It was admitted at load, but the versions of the libraries may be others since.
    return open_model(directory, device=record.device, dtype=record.dtype)


def source_document(manifest: Manifest, encoding: str | None) -> Document:
    """Read the file that a session was loaded from, as it is now.

    Args:
        manifest: The session's.
        encoding: The encoding that was named at load, if one was.

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
