"""What tests of several folders share.

=================  ====================================================================================
``kit.addresses``  addresses and ports that no other test uses
``kit.cluster``    several real agents on one host, whose workers do what the test says
``kit.etcd``       real etcd servers; the fixtures ``etcd`` and ``make_etcd``
``kit.http``       requests to an HTTP server, byte by byte
``kit.jobs``       ``tenax run`` as a user starts it, in a folder of its own; pseudo-terminals
``kit.kinds``      the kind of every test: unit, machine, process, cluster, network, browser, docs
``kit.linear``     checks that a parser does linear work
``kit.processes``  waiting for processes and files, and the proof that a test leaves nothing behind
=================  ====================================================================================

What only one folder uses is in that folder.
"""
