"""The version, where building can read it without importing anything else."""

__version__ = "0.1.0"
