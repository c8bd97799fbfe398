"""Workloads built from other libraries' models: a transformers config, a timm model."""
