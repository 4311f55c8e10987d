"""A float graph and its weights into integers: what to round, how, and what that costs."""
