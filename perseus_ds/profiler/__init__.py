"""Measures time and energy of each instruction at each clock."""
