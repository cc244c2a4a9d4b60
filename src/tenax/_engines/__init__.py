"""How agents and the coordinator reach each other: in one process (local), over TCP, through etcd."""
