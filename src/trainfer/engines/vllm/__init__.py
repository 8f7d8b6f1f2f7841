"""The real vLLM behind the Engine interface."""
