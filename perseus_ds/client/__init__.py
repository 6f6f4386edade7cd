"""Perseus in a training process."""
