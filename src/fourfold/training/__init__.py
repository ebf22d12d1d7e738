"""Training: the step, the trainer, losses, optimizer, data, models from folders, checkpoints, resume, launch."""
