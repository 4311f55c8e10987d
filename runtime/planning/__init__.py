"""Planner: choice of drafter and number of draft tokens by cost and acceptance rate."""
