"""The command `laminar`: runs a job on this host and shows how it goes."""
