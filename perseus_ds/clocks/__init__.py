"""Clocks while training: controller, transitions, read-back and timers."""
