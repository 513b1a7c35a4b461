"""What bfloat16 logits alone do to the gradient of the hidden states, and why that is now 1e-2 and now 2e-1.

    python -m benchmarks.rounded_logits [--tokens 4096] [--hidden 2048] [--columns 8192]

The inputs are those of `benchmarks.fused_head`, all arithmetic float64 but for one rounding: that of the logits. The error
is taken as there, over 64 tokens at equal distances, of which there are tokens / 64 disjoint sets. Runs on a CPU too.
"""

import argparse

import torch

from benchmarks.inputs import DEVICE, exact_gradient, hidden_and_weight, is_clipped, sampled_tokens

SAMPLED = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=8192)
    options = parser.parse_args()
    torch.manual_seed(0)
    hidden, weight = hidden_and_weight(options.tokens, options.hidden, options.columns)
    exact_weight = weight.double()
    logits = torch.cat(
        [(part.double() @ exact_weight.t()).bfloat16() for part in hidden.split(512)]
    )
    tokens = sampled_tokens(logits)
    squares, clipped = [], []
    for rows in torch.arange(options.tokens, device=DEVICE).split(512):
        part, everything = tokens[rows], torch.arange(len(rows), device=DEVICE)
        exact = exact_gradient(hidden[rows].double() @ exact_weight.t(), part, everything)
        rounded = exact_gradient(logits[rows], part, everything)
        wanted, found = (each[2] @ exact_weight for each in (exact, rounded))
        squares.append(torch.stack([(found - wanted).square().sum(1), wanted.square().sum(1)]))
        clipped.append(is_clipped(exact[0], part) != is_clipped(rounded[0], part))
    sets = torch.cat(squares, dim=1).view(2, SAMPLED, -1)  # tokens of one set: a column
    counts = torch.cat(clipped).view(SAMPLED, -1).sum(0)
    share = float(counts.sum()) / options.tokens
    print(
        f"{share:.2%} of the tokens are clipped by rounded logits and not by exact ones, or the reverse"
    )
    errors = (sets[0].sum(0) / sets[1].sum(0)).sqrt()
    for count in counts.unique().tolist():
        low, median, high = errors[counts == count].quantile(
            torch.tensor([0.0, 0.5, 1.0]).to(errors)
        )
        print(
            f"{int((counts == count).sum())} sets with {count} of them: error of dH {low:.1e} to {high:.1e}, "
            f"median {median:.1e}"
        )


if __name__ == "__main__":
    main()
