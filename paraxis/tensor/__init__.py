"""ShardedTensor, its operators outside of graphs, and the metadata of parameters.

Importing the package installs the operators: they build on the class, which therefore cannot import them.
"""

from ..compat.torch import replace_swap_tensors
from . import dispatch
from .parameter_meta import ParameterMeta
from .sharded_tensor import ShardedTensor, ShardSpec, swap_values, unwrap, wrap

ShardedTensor._dispatch = staticmethod(dispatch.dispatch)
replace_swap_tensors(lambda tensor: isinstance(tensor, ShardedTensor), swap_values)

__all__ = ["ParameterMeta", "ShardSpec", "ShardedTensor", "unwrap", "wrap"]
