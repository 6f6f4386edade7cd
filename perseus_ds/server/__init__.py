"""The server of a job: one process decides for all ranks."""
