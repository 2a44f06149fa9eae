"""Rows first: the model's own forward on the rows that are computed, stored KV beside them."""
