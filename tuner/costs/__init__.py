"""Costs of a step shared by strategies, the search and the prediction: each formula is defined once."""
