"""An audit of a bundle on the user's own machine: what `specedge verify` runs. Needs SciPy."""
