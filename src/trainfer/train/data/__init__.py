"""Parquet and JSONL rows -> tokenised prompts in a resumable order."""
