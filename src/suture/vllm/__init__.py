"""Exact corrections inside vLLM. Of suture only modules on tensors are needed: vLLM pins libraries of its own."""
