"""DeepSpeed's pipeline engines; the only place that knows DeepSpeed."""
