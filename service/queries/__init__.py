"""Queries for the REST interface. Each uses an index; see tests/unit/test_query_plans.py."""
