"""From a transformers model to pipeline stages that any engine can train."""
