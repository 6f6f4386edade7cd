"""Training engines: the interface (``engine.py``), and a folder for each engine that implements it."""
