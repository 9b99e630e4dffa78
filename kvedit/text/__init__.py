"""Characters: encodings, documents, edits, units. No tokens, no torch."""
