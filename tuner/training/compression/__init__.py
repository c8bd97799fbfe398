"""Averaging gradients over ranks with fewer bytes: one technique a file. `tuner.training.communication` chooses."""
