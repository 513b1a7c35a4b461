"""Everything that imports Megatron-Core: the scale contract, process groups, versions, CPU running.

The submodules are imported by name (`from megatron_pg.megatron.loss import megatron_loss`); this file
imports none of them, so that `import megatron_pg` works where Megatron is not installed.
"""
