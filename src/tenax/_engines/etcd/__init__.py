"""The etcd engine: an elected agent hosts the coordinator, and its decisions are stored in etcd."""
