"""Gradient averaging over ranks with fewer bytes, one technique per file; `tuner.training.communication` chooses."""
