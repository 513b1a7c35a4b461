"""A whole loop: torchrun --nproc-per-node 2 examples/minimal.py --context-parallel-size 2"""

import argparse
import os
import random

import torch
from megatron.core import distributed, parallel_state, tensor_parallel
from megatron.core.models.hybrid.hybrid_model import HybridModel  # megatron-core 0.18 and later
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

import megatron_pg as pg
from megatron_pg import megatron as pgm

parser = pg.add_policy_loss_args(argparse.ArgumentParser(description=__doc__))
parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
parser.add_argument("--context-parallel-size", type=int, default=1)
args = pg.validate_policy_loss_args(parser.parse_args())
loss = pg.PolicyLossConfig.from_args(args)

if torch.cuda.is_available():
    device = "cuda"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
else:
    device = "cpu"
    pgm.enable_cpu_runtime()
    torch.distributed.init_process_group("gloo")
tp_size, cp_size = args.tensor_model_parallel_size, args.context_parallel_size
parallel_state.initialize_model_parallel(tp_size, context_parallel_size=cp_size)
tensor_parallel.model_parallel_cuda_manual_seed(1)
groups = pgm.ParallelGroups.from_parallel_state()
cp_rank = groups.context_rank

config = TransformerConfig(
    num_layers=4,  # attention and MLP in turn
    hidden_size=32,
    num_attention_heads=4,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    tensor_model_parallel_size=tp_size,
    context_parallel_size=cp_size,
    use_cpu_initialization=device == "cpu",
    calculate_per_token_loss=args.calculate_per_token_loss,  # one of Megatron's two loss modes
    finalize_model_grads_func=distributed.finalize_model_grads,
)
layers, position = pgm.hybrid_stack_spec(config), {"position_embedding_type": "learned_absolute"}
gpt = HybridModel(config, layers, 8, 8, hybrid_layer_pattern="*-*-", **position)
ddp_config = distributed.DistributedDataParallelConfig()
model = distributed.DistributedDataParallel(config, ddp_config, gpt.to(device))
optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01), [model])
run_schedule = get_forward_backward_func()

# Each prompt and each response is one token. The correct response is the next number.
prompts = [prompt for prompt in range(8) for _ in range(8)]  # eight responses per prompt
pairs = [[prompt, answer] for prompt in range(8) for answer in range(8)]
candidates = [pg.Sample(tokens=pair, response_length=1, loss_mask=[1]) for pair in pairs]
for number in range(30):
    # Replace by your engine and your reward. Here: the model's probabilities and a comparison.
    scored = pgm.compute_log_probs(model, candidates, loss, max_tokens_per_microbatch=256)
    log_probs = torch.cat(scored.log_probs).view(8, 8)  # [prompt, answer]
    draw = random.Random(f"{number} {groups.data_rank}")
    answers = [draw.choices(range(8), log_probs[prompt].exp())[0] for prompt in prompts]
    pairs = list(zip(prompts, answers, strict=True))
    rewards = [float(answer == (prompt + 1) % 8) for prompt, answer in pairs]
    advantages = pg.group_advantages(rewards, prompts).advantages.tolist()
    samples = [
        pg.Sample(
            tokens=[prompt, answer],
            response_length=1,
            loss_mask=[1],
            advantages=advantage,
            old_log_probs=[log_probs[prompt, answer]],
            group_index=8 * groups.data_rank + prompt,
        )
        for (prompt, answer), advantage in zip(pairs, advantages, strict=True)
    ]

    plan = pg.plan_step(
        samples,
        max_tokens_per_microbatch=256,
        data_parallel_group=groups.data,
        cp_size=cp_size,
        samples_per_group=8,
    )
    packs = [[samples[index] for index in indices] for indices in plan.microbatches]
    batches = [pg.pack(pack, cp_rank=cp_rank, cp_size=cp_size).to(device) for pack in packs]
    step = pgm.PolicyStep(loss, plan, model=model)

    def forward_step(batch_iterator, model, step=step):
        head = step.head(next(batch_iterator))
        return model(**head.model_inputs), head.loss_func

    model.zero_grad_buffer()
    optimizer.zero_grad()
    output = run_schedule(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=plan.num_microbatches,
        seq_length=256,
        micro_batch_size=1,
        forward_only=False,
    )
    optimizer.step()
    metrics = step.metrics(output)
    if torch.distributed.get_rank() == 0:
        print(f"reward {sum(rewards) / 64:.2f}, ratio {metrics['ratio_new_old']:.4f}", flush=True)
torch.distributed.destroy_process_group()
