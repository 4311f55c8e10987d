"""Known mistakes of speculative decoding, each as one change of a line of the source."""

from .accept_rule import ACCEPT_RULE
from .distributions import DISTRIBUTIONS
from .loop import LOOP

MUTANTS = [*ACCEPT_RULE, *DISTRIBUTIONS, *LOOP]
