"""Where to cut a model, and what another schedule is worth: users of ``optimize()``, not parts of it."""
