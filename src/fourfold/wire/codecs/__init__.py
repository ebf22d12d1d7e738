"""Forms in which tensors cross: one codec a file, found by the file's name (see `plan.Technique`)."""
