"""Our engine: a Transformers module with a paged KV cache and continuous batching."""
