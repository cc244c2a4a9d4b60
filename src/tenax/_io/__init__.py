"""Input and output that knows nothing of runs: the loop, sockets, TLS, HTTP, etcd, pipes and files."""
