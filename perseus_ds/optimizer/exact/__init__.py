"""The solver with its lower bound and certificate."""
