"""Captured rows <-> files."""
