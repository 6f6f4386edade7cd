"""Perseus in a training process: marks in shared memory."""
