"""What is known of a job, from its records in order."""
