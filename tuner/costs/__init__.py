"""Costs of a step that strategies, the search and the prediction share: one formula, in one place."""
