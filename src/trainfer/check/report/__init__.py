"""Results -> text, JSON, HTML. Plain Python."""
