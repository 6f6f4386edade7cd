"""Builds pipeline stages of transformers models, for any engine."""
