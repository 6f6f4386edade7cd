"""Perseus on one rank of a job."""
