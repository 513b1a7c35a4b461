"""Writes responses to imitate, a rollout file for `train.py --policy-loss sft`. The quickstart
begins with it: examples/imitate.py --task NAME --task-settings JSON --rows N FILE

Half of them have two letters exchanged. A model that imitates them has an unreliable skill, which
reinforcement learning can improve.
"""

import argparse
import json
import random
from pathlib import Path

from trainer.tasks import Questions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--task", required=True)
    parser.add_argument("--task-settings", type=json.loads, default={})
    parser.add_argument("--held-out-tasks", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=51_200)
    parser.add_argument("file", type=Path)
    parser.set_defaults(prompt_examples=0, hf_model=None, system_prompt=None)
    args = parser.parse_args()
    questions, draw = Questions(args), random.Random(args.seed)
    args.file.parent.mkdir(parents=True, exist_ok=True)
    with args.file.open("w") as file:
        for _ in range(args.rows):
            entry = draw.choice(questions.training)
            answer = list(entry["answer"])
            if draw.random() < 0.5:
                first, second = draw.sample(range(len(answer)), 2)
                answer[first], answer[second] = answer[second], answer[first]
            response = questions.text.response("".join(answer))
            row = {"prompt_ids": questions.text.prompt(entry["question"]), "advantages": 1.0}
            file.write(json.dumps(row | {"response_ids": response}) + "\n")


if __name__ == "__main__":
    main()
