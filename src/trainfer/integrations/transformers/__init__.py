"""Load a Transformers causal LM and tokenizer; register our attention."""
