"""Pipeline stages: where a model is cut, and how one of its parts runs."""
