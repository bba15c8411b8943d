"""Ground truth for rules: strategies are carried out on real shards and compared with the whole.

- :func:`check` tries everything that a rule offers for a call; registering a rule does so for its samples.
- :func:`propose` finds a rule for an operator by trying, as source to review.
- :func:`missing` finds what is right but not offered.

``python -m paraxis.rules.validation`` checks all rules of this package on sample calls.
"""

from .calls import schema_samples
from .check import Report, check
from .exploration import missing
from .propose import propose

__all__ = ["Report", "check", "missing", "propose", "schema_samples"]
