"""What the engine asks of itself: the calibration, chunks that were missed."""
