"""A client for etcd v3, and etcd members that tenax runs itself."""
