"""Response text -> one float. Plain Python."""
