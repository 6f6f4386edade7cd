"""Reports, timelines and pictures for people."""
