"""The `steptune` command."""
