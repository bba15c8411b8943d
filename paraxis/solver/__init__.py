"""Choosing a placement for every tensor: the program, the candidate layouts, the cost and the search."""

from .cost import CostModel
from .program import Program, Step, Value
from .search import Solution, on_one_rank, search
from .structure import Candidates

__all__ = ["Candidates", "CostModel", "Program", "Solution", "Step", "Value", "on_one_rank", "search"]
