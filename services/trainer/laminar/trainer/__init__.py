"""The trainer: an agent, the torchrun group below it, and what its ranks do (docs/algorithm.md).

agent        registers, heartbeats, starts torchrun, exits with its result (no torch)
rank         the loop: take a batch, train on it, commit it, publish the weights, checkpoint
loss         the clipped token loss and its definitions; batches: what it is computed on
learner      one training step: updates, micro-batches, statistics
policy       the model: loading, sharding, named full tensors
publish      the publisher thread and the bytes it keeps until a version is visible
checkpoint   saving and verifying checkpoints; export: a Hugging Face folder out of one
books        what rank 0 says to the pool
"""
