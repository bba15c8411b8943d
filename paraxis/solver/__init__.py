"""Choosing a placement for every tensor: the program, candidate layouts, costs, constraints and the search."""

from ..errors import ConstraintError
from .account import Account, account
from .choices import Permit
from .constrained import Requirements, solve
from .constraints import Constraint
from .cost import CostModel
from .machine import PRESETS, Link, Machine, machine_of
from .program import Encoded, Program, Step, Value
from .search import search
from .solution import Solution, Unsatisfiable, on_one_rank
from .structure import Candidates

__all__ = [
    "PRESETS",
    "Account",
    "Candidates",
    "Constraint",
    "ConstraintError",
    "CostModel",
    "Encoded",
    "Link",
    "Machine",
    "Permit",
    "Program",
    "Requirements",
    "Solution",
    "Step",
    "Unsatisfiable",
    "Value",
    "account",
    "machine_of",
    "on_one_rank",
    "search",
    "solve",
]
