"""The tokenizer of a checkpoint, from its JSON: text to ids and back. No torch, no transformers.

A session stores this JSON, so its document can be edited without the model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import tokenizers

from kvedit.errors import UsageError
from kvedit.tokens.splice import Tokens

_CONTROL = re.compile(r"<\|[^\s|]+\|>")
_NEVER = -1e9  # a score so low that Unigram prefers any other pieces


def _backend(serialized: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(serialized)
    backend.no_truncation()
    backend.no_padding()
    return backend


class Tokenizer:
    """Tokenize trusted templates with their special tokens, and user text as plain text.

    Args:
        serialized: The JSON of a `tokenizers.Tokenizer`.
    """

    def __init__(self, serialized: str) -> None:
        self.serialized = serialized
        self._backend = _backend(serialized)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the JSON."""
        return hashlib.sha256(self.serialized.encode()).hexdigest()

    def encode_template(self, text: str) -> list[int]:
        """Tokenize a piece of the chat template, with its special tokens. Raises like `encode_text`."""
        return list(self._encode(self._backend, text, as_text=False).ids)

    def encode_as_trained(self, text: str) -> list[int]:
        """Tokenize a text, adding the special tokens that the model was trained to see around it, if any."""
        self._backend.encode_special_tokens = True
        return list(self._backend.encode(text, add_special_tokens=True).ids)

    def encode_text(self, text: str) -> Tokens:
        """Tokenize user text; text that spells a special token is treated as plain text.

        Raises:
            UsageError: It contains lone surrogates, for example from an argument that was not UTF-8.
        """
        encoding = self._encode(self._backend, text)
        if not self._control.isdisjoint(encoding.ids):
            encoding = self._encode(self._literal, text)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return Tokens(np.array(encoding.ids, dtype=np.int64), offsets[:, 0], offsets[:, 1])

    def _encode(
        self, backend: tokenizers.Tokenizer, text: str, *, as_text: bool = True
    ) -> tokenizers.Encoding:
        backend.encode_special_tokens = as_text
        try:
            return backend.encode(text, add_special_tokens=False)
        except TypeError:
            raise UsageError("The text is not valid UTF-8.", "Give it in UTF-8, or in a file.") from None

    @cached_property
    def _control(self) -> frozenset[int]:
        """Ids of control tokens: those marked as special, or spelled as only control tokens are."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(
            number for number, token in added.items() if token.special or _CONTROL.fullmatch(token.content)
        )

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """A backend that never produces control tokens from text.

        The plain backend does if an added token is not marked as special, or if its spelling is an
        ordinary piece of the vocabulary.
        """
        fields = json.loads(self.serialized)
        for token in fields["added_tokens"]:
            token["special"] = token["special"] or token["id"] in self._control
        model = fields["model"]
        if model["type"] == "Unigram":
            model["vocab"] = [
                [piece, _NEVER if number in self._control else score]
                for number, (piece, score) in enumerate(model["vocab"])
            ]
        return _backend(json.dumps(fields))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, without special tokens."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))
