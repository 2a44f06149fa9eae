"""What a server knows of its chunks: which there are, their contexts, where their tokens occur."""
