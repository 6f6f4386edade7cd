"""Every file that is written or read, each with its schema."""
