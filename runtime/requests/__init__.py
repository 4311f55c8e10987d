"""Pipeline, requests, streams, slots and statistics."""
