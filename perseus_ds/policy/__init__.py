"""Which plan the next iteration runs."""
