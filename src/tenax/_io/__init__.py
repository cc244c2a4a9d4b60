"""Input and output, independent of runs: the loop, sockets, TLS, HTTP, etcd, pipes and files."""
