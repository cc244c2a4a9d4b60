"""A folder that stands first on the PYTHONPATH of processes under ``tenax.compat``, for the ``sitecustomize`` in it."""
