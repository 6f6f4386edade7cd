"""One node's GPUs: leases of ranks, locked clocks on record, and the process that resets them."""
