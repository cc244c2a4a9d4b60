"""A client for etcd v3, and members of its own."""
