"""Corrected models in forms that others load."""
