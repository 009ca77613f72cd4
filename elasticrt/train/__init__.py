"""What a training script imports: context, samplers, loop, checkpoints, data preparation."""
