"""The agent of a node, which leases GPUs to ranks, and sets, records and resets their clocks."""
