"""The trainer: an agent, the torchrun group below it, and what its ranks do (docs/algorithm.md).

agent        registers, heartbeats, starts torchrun (launcher), exits with its result (exit_note); no torch
rank         one rank's process; training: its loop; attempt: what the loop calls, the same on every rank
learner      one training step: updates, micro-batches, statistics
loss         the clipped token loss and its definitions; batches: the tensors it is computed on
pulse        the signs by which the agent sees that ranks get on
policy       the model: loading, sharding, log-probs, full tensors; model_folder: what is known before torch
publish      the publisher's thread and the bytes it keeps until a version is visible; lookout: who is master now
checkpoint   saving and restoring; checkpoint_folder: how one lies on disk; export: a Hugging Face folder out of one
books        what a rank says to the pool
"""
