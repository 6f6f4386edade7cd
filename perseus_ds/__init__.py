"""Perseus for DeepSpeed: pipeline-parallel training on less energy, without slowing down."""
