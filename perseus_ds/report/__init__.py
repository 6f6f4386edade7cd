"""What people look at: timelines and pictures of plans."""
