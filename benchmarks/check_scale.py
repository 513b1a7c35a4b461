"""How long `megatron-pg check` takes on rank 0 of a large job, simulated in one process.

    python -m benchmarks.check_scale --ranks 512 [--tensor 2 --context 2]

torch's fake process groups stand for the job: collectives return at once, and this driver plays what the other ranks tell. So
the seconds are rank 0's own: process groups, reference, steps, comparison. The network's are not in them.
"""
