"""Conversion of a traced graph to the graph and weight files of a bundle."""
