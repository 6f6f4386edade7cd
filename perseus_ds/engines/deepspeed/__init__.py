"""Perseus for DeepSpeed's pipeline engines. Only this folder uses DeepSpeed."""
