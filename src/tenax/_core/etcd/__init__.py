"""The operations of etcd and its errors, as values."""
