"""REST, persistence, workers and the command line: what surrounds the engine."""
