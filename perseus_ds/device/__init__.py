"""Clocks in time: controller, transitions, read-back, timers, guardian."""
