"""Every private or version-dependent API of torch and transformers that Paraxis uses, and nothing of it elsewhere.

One name per need, each with what it is for and the versions it was seen on. Paraxis supports torch 2.11 and
transformers 5.17 or newer; "seen on" lists the versions on which this module was imported and its tests were run.
A new version of torch that moves a private name breaks an import in this package, not a model in production.

What stays outside, because it is a contract although the name has an underscore:

- ``torch.ops.aten._name`` and ``torch.ops.mkldnn._name``: registered operators with a schema, matched by identity.
- ``nn.Module._parameters``, ``_buffers``, ``_modules`` and the hook dictionaries: the registries that ``nn.Module``
  documents for subclasses.
- ``Trainer._wrap_model`` and its neighbours: methods that transformers documents as meant to be overridden.
- ``torch.fx.experimental.proxy_tensor`` and ``symbolic_shapes``: documented modules without an underscore.
"""
