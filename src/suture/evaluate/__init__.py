"""Scores: one file a benchmark."""
