"""ShardedTensor, its operators outside of graphs, and the metadata of parameters.

Importing the package installs the operators: they build on the class, which therefore cannot import them.
"""

from . import dispatch
from .parameter_meta import ParameterMeta
from .sharded_tensor import ShardedTensor, ShardSpec, unwrap, wrap

ShardedTensor._dispatch = staticmethod(dispatch.dispatch)

__all__ = ["ParameterMeta", "ShardSpec", "ShardedTensor", "unwrap", "wrap"]
