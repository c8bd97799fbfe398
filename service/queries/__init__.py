"""What the REST interface reads. Each query uses an index; see tests/unit/test_query_plans.py."""
