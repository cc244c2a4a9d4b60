"""Helpers that tests of several folders share.

====================  ================================================================================================
``kit.addresses``     addresses and ports that no other test uses
``kit.cluster``       several real agents on one host, whose workers the test controls
``kit.descriptors``   the open descriptors of a process
``kit.etcd``          real etcd servers; the fixtures ``etcd`` and ``make_etcd``
``kit.http``          requests to an HTTP server, byte by byte
``kit.jobs``          ``tenax run`` as a user starts it, in its own folder; pseudo-terminals
``kit.kinds``         the kind of every test: unit, machine, process, cluster, network, browser, docs
``kit.linear``        checks that a parser does linear work
``kit.processes``     waiting for processes and files; checks that a test leaves nothing behind
``kit.torch_python``  programs in forks of a process that has imported torch; the fixture ``torch_python``
====================  ================================================================================================

Helpers of a single folder are in that folder.
"""
