"""The folder that ``tenax.compat`` puts first on PYTHONPATH, for the ``sitecustomize`` in it."""
