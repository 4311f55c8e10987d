"""Where rounding could turn a choice."""
