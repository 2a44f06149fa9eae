"""The store of chunks' KV: tiers of memory, disk, Redis and S3 behind one object."""
