"""The tokenizer of a checkpoint, as its own JSON: text to ids and back. No torch, no transformers.

A session keeps this JSON, so its document can be edited without the model at hand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import tokenizers

from kvedit.errors import UsageError
from kvedit.tokens import Tokens


class Tokenizer:
    """Encode a trusted template with its special tokens, and a user's text as text.

    Args:
        serialized: The JSON of a `tokenizers.Tokenizer`.
    """

    def __init__(self, serialized: str) -> None:
        self.serialized = serialized
        self._backend = tokenizers.Tokenizer.from_str(serialized)
        self._backend.no_truncation()
        self._backend.no_padding()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the JSON."""
        return hashlib.sha256(self.serialized.encode()).hexdigest()

    def encode_template(self, text: str) -> list[int]:
        """Encode a piece of the chat template; special tokens in it are special."""
        self._backend.encode_special_tokens = False
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_text(self, text: str) -> Tokens:
        """Encode a user's text; what spells a special token is encoded as text.

        Raises:
            UsageError: It holds half characters, as of an argument that was not UTF-8.
        """
        self._backend.encode_special_tokens = True
        try:
            encoding = self._backend.encode(text, add_special_tokens=False)
        except TypeError:
            raise UsageError("The text is not valid UTF-8.", "Write it in UTF-8, or in a file.") from None
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return Tokens(np.array(encoding.ids, dtype=np.int64), offsets[:, 0], offsets[:, 1])

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, leaving special tokens out."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))
