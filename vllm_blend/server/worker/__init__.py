"""In the model's process: chunks' KV, and what the store's tiers hold of it."""
