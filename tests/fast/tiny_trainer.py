"""A trainer of this test's own words, with the seams that slime and miles have: what is verified at
startup.
"""

from types import SimpleNamespace

import torch

mpu = SimpleNamespace()


def load_function(path):
    raise AssertionError(f"the verification does not import {path}")


def calculate_log_probs_and_entropy(*arguments, **keywords):
    raise AssertionError("the verification does not communicate")


class DataIterator:
    def __init__(self, rollout_data, micro_batch_indices):
        self.data, self.left = rollout_data, list(micro_batch_indices)

    def get_next(self, keys):
        rows = self.left.pop(0)
        return {key: [self.data[key][row] for row in rows] for key in keys}


def windows(batch):
    """The rows of this rank's logits, and the response tokens that they score, of each sample."""
    rank, size = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
    first = 0
    for total, length in zip(batch["total_lengths"], batch["response_lengths"], strict=True):
        part = -(-total // (2 * size)) if size > 1 else total
        places = [rank, 2 * size - 1 - rank] if size > 1 else [0]
        positions = [place * part + offset for place in places for offset in range(part)]
        scored = [
            (row, p) for row, p in enumerate(positions) if total - length - 1 <= p < total - 1
        ]
        rows = [first + row for row, _ in scored]
        yield rows, [p - (total - length - 1) for _, p in scored]
        first += len(positions)


def own_mean(batch, values):
    """The sum over the samples of a micro-batch of each one's mean."""
    total, parts = 0.0, values.split([len(tokens) for _, tokens in windows(batch)])
    masks, sums = batch["loss_masks"], batch["rollout_mask_sums"]
    for (_, tokens), value, mask, divisor in zip(windows(batch), parts, masks, sums, strict=True):
        total = total + (value * mask[tokens]).sum() / divisor.clamp(min=1)
    return total


def corrected(args, batch, values):
    """The losses and the batch after the rollout correction of the run, and what it reports."""
    if not (args.use_tis or args.get_mismatch_metrics):
        return values, batch, {}
    train, rollout = batch["log_probs"], batch["rollout_log_probs"]
    masks, tis = batch["loss_masks"], (torch.cat(train) - torch.cat(rollout)).exp()
    if args.custom_tis_function_path is None:
        values = values * tis.clamp(args.tis_clip_low, args.tis_clip)
    else:
        values, masks, _ = load_function(args.custom_tis_function_path)(
            args,
            pg_loss=values,
            train_log_probs=train,
            rollout_log_probs=rollout,
            loss_masks=masks,
            response_lengths=batch["response_lengths"],
        )
    return values, {**batch, "loss_masks": masks}, {"tis": own_mean(batch, tis)}


def reduced(args, batch, values):
    """The policy loss, by a custom reducer where there is one."""
    if args.custom_pg_loss_reducer_function_path is None:
        return own_mean(batch, values)
    make = load_function(args.custom_pg_loss_reducer_function_path)
    return make(batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], False)(
        values
    )


def scale(loss, num_microbatches, rollouts):
    return (
        loss
        * num_microbatches
        / rollouts
        * mpu.get_data_parallel_world_size(with_context_parallel=True)
    )


def loss_function(args, batch, num_microbatches, step_global_batch_size, logits):
    rows = [row for rows, _ in windows(batch) for row in rows]
    pairs = zip(
        batch["tokens"],
        batch["total_lengths"],
        batch["response_lengths"],
        windows(batch),
        strict=True,
    )
    targets = torch.cat(
        [tokens[total - length :][chosen] for tokens, total, length, (_, chosen) in pairs]
    )
    log_probs, entropy = calculate_log_probs_and_entropy(
        logits[0, rows], targets, None, with_entropy=True
    )
    log_probs = log_probs.squeeze(-1)
    old, reference, advantages = (
        torch.cat(batch[key]) for key in ("log_probs", "ref_log_probs", "advantages")
    )
    ratio = (log_probs - old).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
    whole = batch
    values, batch, log = corrected(args, batch, torch.maximum(plain, clipped))
    if log:
        log["ois"] = own_mean(whole, ratio)
    log |= {
        "pg_loss": reduced(args, batch, values),
        "pg_clipfrac": own_mean(batch, (clipped > plain).float()),
        "ppo_kl": own_mean(batch, old - log_probs),
        "entropy_loss": own_mean(batch, entropy),
        "kl_loss": own_mean(batch, (log_probs - reference).square() / 2),
        "another": torch.tensor(7.0),
    }
    loss = (
        log["pg_loss"]
        + args.kl_loss_coef * log["kl_loss"]
        - args.entropy_coef * log["entropy_loss"]
    )
    log = {"loss": loss, **log}
    values = torch.stack([torch.tensor(0.0), *(value.detach() for value in log.values())])
    return (
        scale(loss, num_microbatches, step_global_batch_size),
        torch.tensor(1),
        {"keys": list(log), "values": values},
    )
