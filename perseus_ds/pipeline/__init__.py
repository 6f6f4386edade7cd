"""The parts of an iteration: instructions, schedule and DAG."""
