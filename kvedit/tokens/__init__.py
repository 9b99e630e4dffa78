"""Token ids: the tokenizer, the splice of an edit, the layout of a prompt. No torch."""
