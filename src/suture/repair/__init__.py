"""Repair inside the layers: patches of linears, and how they are found."""
