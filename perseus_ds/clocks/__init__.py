"""Timing of operations on the device: events and timers."""
