"""What papers say of the speed, as functions."""
