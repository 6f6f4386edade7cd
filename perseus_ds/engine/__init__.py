"""The only place that knows DeepSpeed: pipeline engine, replay of passes, supported versions."""
