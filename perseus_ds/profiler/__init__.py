"""Measures what each instruction takes and uses at each clock."""
