"""The REST interface: one file for each kind of resource, and what they share."""
