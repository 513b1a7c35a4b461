"""A whole loop, on CPU or GPU: torchrun --nproc-per-node 2 examples/minimal.py --context-parallel-size 2"""

import argparse
import os
import random

import torch
from megatron.core import distributed, parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

import megatron_pg as pg
from megatron_pg import megatron as pgm

parser = pg.add_policy_loss_args(argparse.ArgumentParser(description=__doc__))
for axis in (axes := ("tensor_model_parallel_size", "context_parallel_size")):
    parser.add_argument(f"--{axis.replace('_', '-')}", type=int, default=1)
args = pg.validate_policy_loss_args(parser.parse_args())
on_gpu, sizes = torch.cuda.is_available(), {axis: getattr(args, axis) for axis in axes}
device = "cuda" if on_gpu else "cpu"
torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) if on_gpu else pgm.enable_cpu_runtime()
torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
parallel_state.initialize_model_parallel(**sizes)
tensor_parallel.model_parallel_cuda_manual_seed(1)
groups, loss = pgm.ParallelGroups.from_parallel_state(), pg.PolicyLossConfig.from_args(args)
cp, budget = {"cp_size": groups.context_size}, {"max_tokens_per_microbatch": 256}

shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, **sizes}
shape |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "use_cpu_initialization": not on_gpu}
shape |= {"calculate_per_token_loss": args.calculate_per_token_loss}  # of Megatron's two loss modes
config = TransformerConfig(**shape, finalize_model_grads_func=distributed.finalize_model_grads)
gpt = GPTModel(config, pgm.torch_block_spec(config), vocab_size=8, max_sequence_length=8)
ddp_config = distributed.DistributedDataParallelConfig()
model = distributed.DistributedDataParallel(config, ddp_config, gpt.to(device))
optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01), [model])
schedule = {"model": model, "seq_length": 256, "micro_batch_size": 1, "forward_only": False}
known, whole = {"response_length": 1, "loss_mask": [1]}, {"samples_per_group": 8}

for number in range(30):
    # Your engine and your reward: here the model's own probabilities, and whether the answer is the next number.
    draw, first_group = random.Random(f"{number} {groups.data_rank}"), 8 * groups.data_rank
    options = [pg.Sample(tokens=[i // 8, i % 8], **known) for i in range(64)]
    scores = torch.cat(pgm.compute_log_probs(model, options, loss, **budget).log_probs).view(8, 8)
    asked = [(p, draw.choices(range(8), scores[p].exp())[0]) for p in range(8) for _ in range(8)]
    rewards = [float(token == (p + 1) % 8) for p, token in asked]
    advantages = pg.group_advantages(rewards, [p for p, _ in asked]).advantages.tolist()
    samples = []
    for (p, token), advantage in zip(asked, advantages, strict=True):
        own = {"advantages": advantage, "old_log_probs": [scores[p, token]], **known}
        samples.append(pg.Sample(tokens=[p, token], group_index=first_group + p, **own))

    plan = pg.plan_step(samples, data_parallel_group=groups.data, **whole, **cp, **budget)
    packs = [[samples[index] for index in indices] for indices in plan.microbatches]
    batches = [pg.pack(each, cp_rank=groups.context_rank, **cp).to(device) for each in packs]
    step = pgm.PolicyStep(loss, plan, model=model)

    def forward_step(batch_iterator, model, step=step):
        head = step.head(next(batch_iterator))
        return model(**head.model_inputs), head.loss_func

    model.zero_grad_buffer()
    optimizer.zero_grad()
    schedule |= {"forward_step_func": forward_step, "data_iterator": iter(batches)}
    output = get_forward_backward_func()(num_microbatches=plan.num_microbatches, **schedule)
    optimizer.step()
    metrics = step.metrics(output)
    if torch.distributed.get_rank() == 0:
        print(f"reward {sum(rewards) / 64:.2f}, ratio {metrics['ratio_new_old']:.4f}", flush=True)
