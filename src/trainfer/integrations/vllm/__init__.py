"""Attach the probe to a vLLM worker."""
