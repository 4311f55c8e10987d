"""From a traced graph to the files of a bundle."""
