"""Chooses the plan of the next iteration."""
