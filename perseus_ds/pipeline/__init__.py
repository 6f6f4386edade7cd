"""What an iteration consists of: instructions, schedule, DAG; no GPU, torch or engine in it."""
