"""The etcd engine: the coordinator in an agent that was elected, its decisions in etcd."""
