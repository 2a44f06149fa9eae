"""In the API server's process: requests are checked, marked chunks found, what was reused counted."""
