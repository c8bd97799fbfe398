"""Workloads made from what other libraries name: a transformers config, a timm model."""
