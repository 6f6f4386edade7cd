"""What is known of a job while it runs: computed from its records as they come, in one place."""
