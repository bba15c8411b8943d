"""Every private or version-dependent API of torch and transformers that Paraxis uses, and nothing of it elsewhere.

One name per need, each with what it is for. Paraxis supports torch 2.11 and transformers 5.17 or newer; "seen on" lists
the versions on which the tests of this package were run. A version that moves a private name breaks an import or a test
here, where there is one place to repair. ``tests/compat/test_private_apis.py`` looks for private names elsewhere.

What stays outside although its name has an underscore:

- ``torch.ops.aten._name``, ``torch.ops.mkldnn._name`` and ``torch.ops._c10d_functional``: registered operators with a
  schema, matched by identity.
- ``nn.Module._parameters``, ``_buffers``, ``_modules`` and the dictionaries of hooks: the registries of a module, which
  its documentation and every library that rewrites modules refer to.
- ``nn.Module._apply`` and methods of ``Trainer`` such as ``_wrap_model``: overridden, not called; there is no public
  method for it.
- ``torch.fx.experimental.proxy_tensor`` and ``symbolic_shapes``: documented, and without an underscore.
"""
