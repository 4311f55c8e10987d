"""Discovery and loading of checkpoints, whose weights stay memory-mapped."""
