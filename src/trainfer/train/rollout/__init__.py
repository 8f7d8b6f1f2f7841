"""Prompts -> sequences: the Engine interface and group sampling with a seed per sequence."""
