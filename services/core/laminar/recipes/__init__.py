"""Tasks and rewards that a job names; nothing in laminar imports them by name."""
