"""Derive the layout of the prompt from a checkpoint's chat template.

The template's text before the document is the head; the text after it surrounds the question. A model without
a chat template gets a plain layout.
"""

from __future__ import annotations

from typing import Any

from kvedit.errors import ModelError
from kvedit.tokens.prompt import Prompt
from kvedit.tokens.tokenizer import Tokenizer

_DOCUMENT, _QUESTION = "\ue000kvedit-document\ue001", "\ue000kvedit-question\ue001"
_ANSWER, _NEXT = "\ue000kvedit-answer\ue001", "\ue000kvedit-next\ue001"
_INSTRUCTION = "Answer the question from this text.\n\n"
_BETWEEN = "\n\nQuestion: "
_PLAIN_ENDING = "\nAnswer:"
_PLAIN_NEXT = "\n\nQuestion: "


def layout(tokenizer: Any, own: Tokenizer, system: str | None) -> Prompt:
    """Return the layout of the prompt.

    Args:
        tokenizer: The transformers tokenizer, which has the template.
        own: kvedit's version of the same tokenizer.
        system: System text, if any; prepended to the user's turn if the template has no system role.

    Raises:
        ModelError: The template fails, or does not keep the user's text.
    """
    content = f"{_INSTRUCTION}{_DOCUMENT}{_BETWEEN}{_QUESTION}"
    if tokenizer.chat_template is None:
        start = _start(tokenizer, own)
        opening = f"{system}\n\n" if system else ""
        return _split(f"{start}{opening}{content}{_PLAIN_ENDING}", _PLAIN_NEXT, own)
    roles = [{"role": "system", "content": system}] if system else []
    user = {"role": "user", "content": content}
    try:
        text = _render(tokenizer, [*roles, user])
    except Exception as error:
        if not system:
            raise ModelError(
                f"The model's chat template cannot be used ({error}).", "Choose another model."
            ) from None
        roles, user = [], {"role": "user", "content": f"{system}\n\n{content}"}
        text = _render(tokenizer, [user])
    turns = [{"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _NEXT}]
    longer = _render(tokenizer, [*roles, user, *turns])
    return _split(text, longer.rpartition(_ANSWER)[2].partition(_NEXT)[0], own)


def _start(tokenizer: Any, own: Tokenizer) -> str:
    """Return the token that the tokenizer puts before a text, or an empty string."""
    first = own.encode_as_trained("")[:1]
    return str(tokenizer.bos_token) if first and first == [tokenizer.bos_token_id] else ""


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _split(text: str, before_next: str, own: Tokenizer) -> Prompt:
    if text.count(_DOCUMENT) != 1 or text.count(_QUESTION) != 1:
        raise ModelError(
            "The model's chat template changes the user's text.",
            "Choose a model with a different chat template.",
        )
    head, rest = text.split(_DOCUMENT)
    before, after = rest.split(_QUESTION)
    return Prompt(tuple(own.encode_template(head)), before, after, before_next)
