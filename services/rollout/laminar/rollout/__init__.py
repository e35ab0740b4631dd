"""The rollout service: generates trajectories with the newest weights it holds."""
