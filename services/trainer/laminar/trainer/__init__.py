"""The trainer: an agent, the torchrun group below it, and what its ranks do (docs/algorithm.md).

agent        registers, heartbeats, starts torchrun (launcher), exits with its result (exit_note); no torch
rank         one rank's process; loop: its main loop and its ends; attempt: what the loop calls, equal on every rank
training     the rank that trains with torch; torch_state: its weights, as the attempt hands them on
emulated     the rank that only takes the time of a group; emulated_rank: its process
learner      one training step: updates, micro-batches, statistics
loss         the clipped token loss and its definitions; batches: the tensors it is computed on
pulse        the signs by which the agent sees that ranks get on
policy       the model: loading, sharding, log-probs, full tensors; model_folder: what is known before torch
publish      the publisher's thread and the bytes it keeps until a version is visible; lookout: who is master now
saving       when checkpoints are saved and removed; checkpoint: what is in one; checkpoint_folder: how one lies on
             disk; export: a Hugging Face folder out of one
books        what a rank says to the pool
"""
