"""The pool service: hands out prompts, keeps trajectories and forms training batches."""
