"""Ground truth for rules: strategies run on real shards, compared with the unsharded operator.

- :func:`check` validates every strategy of a rule for a call; registering a rule does so for its samples.
- :func:`propose` finds a rule for an operator by trial and error, as source to review.
- :func:`missing` finds sound strategies that a rule does not have.

``python -m paraxis.rules.validation`` validates all rules of this package on sample calls.
"""

from .calls import schema_samples
from .check import Report, check
from .exploration import missing
from .propose import propose

__all__ = ["Report", "check", "missing", "propose", "schema_samples"]
