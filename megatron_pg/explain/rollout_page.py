"""HTML page with the responses in rollout files, their rewards, and their per-token numbers."""

import heapq
import itertools
import json
import math
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron_pg.config import PolicyLossConfig
from megatron_pg.rollout_files import RewardedSample, RolloutFiles, with_group_advantages

PAGE_BYTES = 45_000_000
"""Maximum bytes of responses on a page. A browser opens 50 MB in a second or two."""
WORST_SHARE = 0.05
"""Share of the bytes for the worst cases of each kind."""
RANDOM_SHARE = 0.6
PART_BYTES = 1_000_000
"""Bytes of an entry after which the next response to the prompt starts a new entry."""
AT_RANDOM = "drawn at random"
RATIOS = {
    "new_old": ("new_log_probs", "old_log_probs"),
    "old_rollout": ("old_log_probs", "rollout_log_probs"),
    "old_ref": ("old_log_probs", "ref_log_probs"),
}
"""Per-token log-ratios: log-prob in the first field minus log-prob in the second."""
Kinds = dict[str, float]
"""Kinds of worst cases, and how bad a response is of each kind, -inf if unknown."""
FOLDER = Path(__file__).with_name("page")


class Response(NamedTuple):
    """An response on the page, and what the steps' numbers and the choice of entries need of it."""

    json: dict[str, Any]
    rollout_id: int | None
    reward: float | None
    num_tokens: int
    num_with_ratio: int
    num_clipped: int
    largest_ratio: float
    kinds: Kinds


@dataclass
class Step:
    """Numbers of all responses in a step, on the page or not."""

    name: str
    responses: int = 0
    rewards: list[float] = field(default_factory=list)
    """Rewards of the rollouts, whose rows are contiguous."""
    latest_rollout: int | None = None
    tokens: int = 0
    with_ratio: int = 0
    clipped: int = 0
    largest_ratio: float = -math.inf

    def add(self, response: Response) -> None:
        """Add a response."""
        self.responses += 1
        is_first = response.rollout_id is None or response.rollout_id != self.latest_rollout
        self.latest_rollout = response.rollout_id
        self.rewards += [response.reward] if is_first and response.reward is not None else []
        self.tokens += response.num_tokens
        self.with_ratio += response.num_with_ratio
        self.clipped += response.num_clipped
        self.largest_ratio = max(self.largest_ratio, response.largest_ratio)

    def json(self) -> dict[str, Any]:
        """Return the step's numbers, None for numbers that the files lack."""
        return {
            "name": self.name,
            "responses": self.responses,
            "reward": round(sum(self.rewards) / len(self.rewards), 4) if self.rewards else None,
            "length": round(self.tokens / self.responses, 2),
            "clipped": round(self.clipped / self.with_ratio, 4) if self.with_ratio else None,
            "ratio": None if math.isinf(self.largest_ratio) else round(self.largest_ratio, 4),
        }


@dataclass
class Largest:
    """Entries with the largest keys, within a number of bytes, and at least one."""

    limit: float
    size: int = 0
    heap: list[tuple[float, float, int, str]] = field(default_factory=list)
    """Key, random tie-breaker, position in the files, and text."""

    def add(self, *entry: Any) -> None:
        """Add an entry and drop the smallest ones beyond the limit."""
        heapq.heappush(self.heap, entry)
        self.size += len(entry[-1])
        while self.size > self.limit and len(self.heap) > 1:
            self.size -= len(heapq.heappop(self.heap)[-1])


def write_rollout_page(
    path: str | Path,
    files: RolloutFiles,
    config: PolicyLossConfig,
    *,
    title: str,
    tokenizer: str | Path | None = None,
) -> None:
    """Write the rows of rollout files as one HTML file that a browser can open from disk.

    The page has every prompt group up to `PAGE_BYTES`. Beyond that it has the worst groups of each
    kind and random ones, and names them. The numbers by step always cover all rows. Memory holds
    only the page's groups.

    Args:
        path: the HTML file.
        files: the rows, from its position on. The rows of a prompt group are contiguous.
        config: the policy loss. The clip bounds of `ppo` decide which tokens are shown as clipped.
        title: the heading.
        tokenizer: a Hugging Face folder, or a JSON file with texts by token id. None shows ids.

    Raises:
        RowError: a row is not a sample, unless `files` skips it (a ValueError).
        ValueError: the files have no sample, or the tokenizer cannot be read.
    """
    selection = _Selection(config)
    for name, group in itertools.groupby(_named_samples(files), key=lambda pair: pair[0]):
        selection.add(name[0], [sample for _, sample in group])
    if not selection.count:
        raise ValueError(f"no sample in the rollout files ({files.num_skipped} bad rows skipped)")
    entries = {place: text for kept in selection.kept.values() for *_, place, text in kept.heap}
    places = sorted(entries)
    kinds: dict[int, list[int]] = defaultdict(list)
    for number, kept in enumerate(selection.kept.values()):
        for *_, place, _ in kept.heap:
            kinds[place].append(number)
    head = {
        "title": title,
        "clip": selection.clip
        and [None if math.isinf(bound) else bound for bound in selection.clip],
        "ratios": [name for name in RATIOS if name in selection.ratios],
        "estimated": selection.num_estimated,
        "skipped": files.num_skipped,
        "steps": [step.json() for step in selection.steps.values()],
        "entries": selection.count,
        "kinds": list(selection.kept),
        "kept_for": [kinds[place] for place in places] if len(places) < selection.count else None,
        "texts": None if tokenizer is None else _texts(tokenizer, entries.values()),
    }
    body = ",\n".join(entries[place] for place in places)
    # A response may contain text that closes a script or opens a comment.
    data = f'{json.dumps(head)[:-1]}, "groups": [\n{body}\n]}}'.replace("<", "\\u003c")
    import jinja2  # a dependency of torch

    loader = jinja2.FileSystemLoader(FOLDER)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("page.html").render(title=title, data=data)
    Path(path).write_text(page, encoding="utf-8")


class _Selection:
    """Entries for a page, and the numbers of the steps."""

    def __init__(self, config: PolicyLossConfig) -> None:
        high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
        low = math.log1p(-config.eps_clip) if config.eps_clip < 1 else -math.inf
        # Other losses clip a different ratio, or keep the gradient of tokens outside the bounds.
        is_clipped = config.policy_loss == "ppo" and config.ratio_anchor == "old"
        self.clip = (low, math.log1p(high)) if is_clipped else None
        self.steps: dict[str, Step] = {}
        self.ratios: set[str] = set()
        self.num_estimated = self.count = 0
        self.kept = {AT_RANDOM: Largest(RANDOM_SHARE * PAGE_BYTES)}
        self._random = random.Random(0)

    def add(self, name: str, samples: Sequence[RewardedSample]) -> None:
        """Add the responses to one prompt."""
        step = self.steps.setdefault(name, Step(name))
        place = list(self.steps).index(name)
        advantages, is_estimated = _advantages(samples)
        self.num_estimated += len(samples) * is_estimated
        texts: list[str] = []
        kinds: list[Kinds] = []
        for sample, values in zip(samples, advantages, strict=True):
            response = _response(sample, values, self.clip)
            self.ratios.update(RATIOS.keys() & response.json.keys())
            step.add(response)
            texts.append(json.dumps(response.json, separators=(",", ":")))
            kinds.append(response.kinds)
            if sum(map(len, texts)) > PART_BYTES:
                self._keep(place, samples[0], texts, kinds)
                texts, kinds = [], []
        if texts:
            self._keep(place, samples[0], texts, kinds)

    def _keep(self, step: int, first: RewardedSample, texts: list[str], kinds: list[Kinds]) -> None:
        prompt = first.tokens[: first.prompt_length].tolist()
        fields = {"s": step, "g": first.group_index, "p": prompt}
        entry = json.dumps(fields, separators=(",", ":"))
        entry = f'{entry[:-1]},"a":[{",".join(texts)}]}}'
        draw = self._random.random()
        keys = {AT_RANDOM: draw} | {kind: max(k[kind] for k in kinds) for kind in kinds[0]}
        for kind, key in keys.items():
            kept = self.kept.setdefault(kind, Largest(WORST_SHARE * PAGE_BYTES))
            if key > -math.inf:
                kept.add(key, draw, self.count, entry)
        self.count += 1


def _named_samples(files: RolloutFiles) -> Iterator[tuple[tuple[str, object], RewardedSample]]:
    """Yield the samples with their step's name and their prompt group, or the row as the group."""
    for number in itertools.count():
        pulled: Any = files.pull(1)
        if not pulled:
            return
        if (sample := pulled[0]) is None:
            continue
        # step_000012.jsonl is step 12.
        stem = Path(sample.name.rpartition(" row ")[0]).stem
        name = re.sub(r"[_-]0*(\d+)$", r" \1", stem)
        if sample.policy_version is not None:
            name = f"policy version {_newest(sample.policy_version)}"
        group = f"row {number}" if sample.group_index is None else sample.group_index
        yield (name, group), sample


def _newest(version: int | Tensor) -> int:
    """Return the newest policy version in a response."""
    return version if isinstance(version, int) else max(version.tolist(), default=0)


def _advantages(samples: Sequence[RewardedSample]) -> tuple[list[Tensor | None], bool]:
    """Return the advantages of the responses to a prompt, and whether they were estimated from
    rewards by grpo. Without advantages and groups they are None.
    """
    if all(sample.has_advantages for sample in samples):
        return [sample.advantages for sample in samples], False
    if samples[0].group_index is None:
        return [None] * len(samples), False
    estimated, _ = with_group_advantages(samples, allow_different_prompts=True)
    return [sample.advantages for sample in estimated], True


def _response(
    sample: RewardedSample, advantages: Tensor | None, clip: tuple[float, float] | None
) -> Response:
    """Make the JSON for a response: `n` name, `r` reward, `t` tokens, `m` mask unless all 1, `a`
    advantage or advantages, log-ratios.
    """
    active, has_active = sample.loss_mask, sample.num_active_tokens > 0
    shown: dict[str, Any] = {"n": sample.name, "r": sample.reward}
    shown["t"] = sample.tokens[sample.prompt_length :].tolist()
    if sample.num_active_tokens < sample.response_length:
        shown["m"] = "".join(map(str, active.int().tolist()))
    kinds: Kinds = {"longest": float(sample.response_length)}
    kinds["lowest reward"] = -math.inf if sample.reward is None else -sample.reward
    kinds["largest |advantage|"] = -math.inf
    if advantages is not None:
        values = _numbers(advantages)
        shown["a"] = values[0] if len(set(values)) == 1 else values
        if has_active:
            kinds["largest |advantage|"] = float(advantages[active].abs().max())
    largest, num_with_ratio, num_clipped = -math.inf, 0, 0
    for name, fields in RATIOS.items():
        first, second = (getattr(sample, log_probs) for log_probs in fields)
        kinds[f"largest |log-ratio| {name}"] = -math.inf
        if first is None or second is None or not has_active:
            continue
        ratio = first - second
        shown[name] = _numbers(ratio.masked_fill(~active, math.nan))
        size = float(ratio[active].abs().max())
        kinds[f"largest |log-ratio| {name}"] = size
        largest = size if largest == -math.inf else largest
        if name == "new_old" and clip is not None:
            num_with_ratio = sample.num_active_tokens
            above, below = ratio > clip[1], ratio < clip[0]
            if advantages is not None:  # the other side keeps its gradient
                above, below = above & (advantages > 0), below & (advantages < 0)
            num_clipped = int(((above | below) & active).sum())
    kinds["most clipped"] = num_clipped / num_with_ratio if num_with_ratio else -math.inf
    counts = (sample.response_length, num_with_ratio, num_clipped)
    return Response(shown, sample.rollout_id, sample.reward, *counts, largest, kinds)


def _numbers(values: Tensor) -> list[float | None]:
    """Round to four decimals, and NaN to None."""
    rounded: list[float] = values.double().numpy().round(4).tolist()
    return [None if value != value else value for value in rounded]


def _texts(tokenizer: str | Path, entries: Iterable[str]) -> dict[int, str]:
    """Return the texts of the entries' tokens."""
    ids: set[int] = set()
    for entry in map(json.loads, entries):
        ids.update(entry["p"], *(response["t"] for response in entry["a"]))
    if Path(tokenizer).is_file():
        try:
            texts = {
                int(token): str(text)
                for token, text in json.loads(Path(tokenizer).read_text()).items()
            }
        except (ValueError, AttributeError) as error:
            raise ValueError(
                f"--tokenizer {tokenizer}: expected a JSON object of texts by token id, or a "
                f"Hugging Face folder ({error})"
            ) from error
        return {token: texts[token] for token in sorted(ids & texts.keys())}
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            "--tokenizer FOLDER requires transformers: pip install transformers"
        ) from error
    decode: Any = AutoTokenizer.from_pretrained(tokenizer).batch_decode
    ordered = sorted(token for token in ids if token >= 0)
    return dict(zip(ordered, decode([[token] for token in ordered]), strict=True))
