"""REST interface, persistence, workers and command line: everything around the engine."""
