"""What is installed on a machine, and what works there."""
