"""Aligned records -> differences and a verdict."""
