"""The real vLLM: requests → vLLM → completions, and the actor's weights → what vLLM computes with, proven."""
