"""Lay the prompt out with a checkpoint's chat template.

The head is what the template puts before the document; the question part is what it puts
after it. A model without a chat template gets a plain layout.
"""

from __future__ import annotations

from typing import Any

from kvedit.errors import ModelError
from kvedit.prompt import Prompt
from kvedit.tokenizer import Tokenizer

_DOCUMENT, _QUESTION = "\ue000kvedit-document\ue001", "\ue000kvedit-question\ue001"
_INSTRUCTION = "Answer the question from this text.\n\n"
_BETWEEN = "\n\nQuestion: "
_PLAIN_ENDING = "\nAnswer:"


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
        start = tokenizer.bos_token or ""
        opening = f"{system}\n\n" if system else ""
        return _split(f"{start}{opening}{content}{_PLAIN_ENDING}", own)
    roles = [{"role": "system", "content": system}] if system else []
    try:
        text = _render(tokenizer, [*roles, {"role": "user", "content": content}])
    except Exception as error:
        if not system:
            raise ModelError(
                f"The model's chat template cannot be used ({error}).", "Choose another model."
            ) from None
        text = _render(tokenizer, [{"role": "user", "content": f"{system}\n\n{content}"}])
    return _split(text, own)


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _split(text: str, own: Tokenizer) -> Prompt:
    if text.count(_DOCUMENT) != 1 or text.count(_QUESTION) != 1:
        raise ModelError(
            "The model's chat template does not keep the user's text as it is.",
            "Choose a model with another chat template.",
        )
    head, rest = text.split(_DOCUMENT)
    before, after = rest.split(_QUESTION)
    return Prompt(tuple(own.encode_template(head)), before, after)
