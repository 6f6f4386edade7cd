"""What clients and agents share: the layout of shared memory, messages, and where an agent is found."""
