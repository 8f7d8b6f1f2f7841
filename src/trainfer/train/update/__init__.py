"""Sequences -> log-probs -> loss -> optimizer step."""
