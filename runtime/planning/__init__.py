"""Planner: choice of drafter and K by measured costs and acceptance rates."""
