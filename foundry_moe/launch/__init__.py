"""What happens before training: a run's configuration, spare ranks, the launcher, and how a mistake is told."""
