"""Who trains: the interface of engines (``engine.py``), and a folder for each engine behind it."""
