"""Lay the prompt out with a checkpoint's chat template.

The head is what the template puts before the document; the question part is what it puts
after it. A model without a chat template gets a plain layout.
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
    """Lay the prompt out with the model's chat template.

    Args:
        tokenizer: The transformers tokenizer, which holds the template.
        own: The same tokenizer as kvedit encodes with.
        system: System text, if any; folded into the user's turn where a template has no such role.

    Raises:
        ModelError: The template does not give the user's text back.
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
    """Give the token that the tokenizer itself puts before a text, if it does so: not every model has one."""
    first = own.encode_as_trained("")[:1]
    return str(tokenizer.bos_token) if first and first == [tokenizer.bos_token_id] else ""


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _split(text: str, before_next: str, own: Tokenizer) -> Prompt:
    if text.count(_DOCUMENT) != 1 or text.count(_QUESTION) != 1:
        raise ModelError(
            "The model's chat template does not keep the user's text as it is.",
            "Choose a model with another chat template.",
        )
    head, rest = text.split(_DOCUMENT)
    before, after = rest.split(_QUESTION)
    return Prompt(tuple(own.encode_template(head)), before, after, before_next)
