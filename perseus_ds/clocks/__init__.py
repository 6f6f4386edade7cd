"""Clocks while training: controller, transitions, read-back, timers, guardian."""
