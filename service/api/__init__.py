"""The REST interface: one module for each kind of resource, and shared modules."""
