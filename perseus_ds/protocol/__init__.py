"""Protocol of clients and agents: layout of shared memory, messages, and location of agents."""
