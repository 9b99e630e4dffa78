"""Checkpoints: found, converted, admitted and read. The only package that knows transformers."""
