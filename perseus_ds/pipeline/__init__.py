"""The parts of an iteration: instructions, schedule, DAG. Independent of GPUs, torch and engines."""
