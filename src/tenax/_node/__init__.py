"""The runtime: one mailbox, one loop; events go to the core, its commands go to the ports."""
