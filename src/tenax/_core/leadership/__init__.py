"""Leadership through etcd as a pure machine: who leads, what is decided, whose answers count."""
