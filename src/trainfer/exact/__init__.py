"""Operators that give a row the same bits whatever else is in the batch."""
