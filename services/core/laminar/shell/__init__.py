"""What the services share when they act: serving, clients, clocks, logs and metrics."""
