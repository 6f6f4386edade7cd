"""Megatron-Core's pipeline schedules; the only place that knows Megatron."""
