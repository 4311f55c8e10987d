"""A checkpoint: found on disk or on the hub, its weights read where they lie."""
