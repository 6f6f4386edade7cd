"""Perseus for the pipeline schedules of Megatron-Core. Only this folder uses Megatron."""
