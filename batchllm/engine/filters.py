"""Drawing one token per row from filtered logits: temperature, then top-k, top-p and min-p, each row as if alone.

Tokens are ranked by (logit descending, id ascending). In that order every filter keeps a prefix, so the kept set is a
length: top-k keeps k; top-p the shortest prefix that holds at least p of what top-k left; min-p those of at least
`min_p` times the best. Ties are broken by id, exactly: `top_k` 1 and a tiny `top_p` are greedy, ties or not.

A row's bits depend on that row alone. It is normalised by softmax (under top-k it need not be) and summed by `cumsum`,
which walk each row by itself, or by `sum` over short fixed runs; never by one `sum` over the row, which splits a lone
row over the threads.
Ranking reads the best `WIDTHS[0]` tokens first, more only where the cut lies behind them, and gives the same sums,
bit for bit, whatever the width, because a prefix sum does not see what follows. This holds on the CPU; a GPU may group
the float64 sums by the shape of the batch, which moves a cut by about 1e-16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

WIDTHS = (256, 4096)
"""How many of the best tokens are ranked, one width after the other, before a whole row is."""

_GROUP = 16
"""Tokens of a group, of which only the best is looked at until it is known which groups may hold the best tokens."""

_RUN = 128
"""Tokens that are summed at once where a row is not ranked."""


@dataclass(frozen=True, slots=True)
class DrawRows:
    """The settings of the rows that are drawn, each `[num_rows]` on the logits' device.

    `temperature` float32, above 0. `top_k` int64 in [1, vocabulary]. `top_p` float64, 1 is off. `min_p` float32, 0 is
    off. `uniform` float64 in [0, 1): the row's random number.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor

    def select(self, rows: torch.Tensor) -> DrawRows:
        """The settings of the rows numbered int64 `rows`."""
        return DrawRows(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            uniform=self.uniform[rows],
        )


def leading_ids(logits: torch.Tensor, num_ids: int) -> torch.Tensor:
    """The best tokens of each row by (logit descending, id ascending): int64 `[num_rows, num_ids]`. No NaN allowed."""
    width = min(num_ids + 8, logits.shape[1])  # some to spare, for ties at the end
    ids, num_exact = _rank(logits, width)
    ids = ids[:, :num_ids]
    tied = torch.nonzero(num_exact < num_ids).squeeze(1)
    if tied.numel():
        ids[tied] = _rank(logits[tied], logits.shape[1])[0][:, :num_ids]
    return ids


def _rank(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` best tokens in order, and how many of them are exact, int64 `[num_rows]`.

    `topk` may leave out any of those that equal its last value, so only what lies above that value is exact.
    """
    if width == logits.shape[1]:
        ids = torch.sort(logits, dim=1, descending=True, stable=True).indices
        return ids, torch.full((len(logits),), width, device=logits.device)
    ids = _best_ids(logits, width).sort(dim=1).values
    values, order = torch.sort(logits.gather(1, ids), dim=1, descending=True, stable=True)
    return ids.gather(1, order), (values > values[:, -1:]).sum(dim=1)


def _best_ids(logits: torch.Tensor, width: int) -> torch.Tensor:
    """The `width` best tokens of each row in any order; any of those that equal the last. int64 `[num_rows, width]`."""
    num_groups = logits.shape[1] // _GROUP
    if 2 * width > num_groups:
        return torch.topk(logits, width, dim=1, sorted=False).indices
    # A token among the best is in one of the groups with the best maxima. Group g is g, g + num_groups, ...: this way
    # maxima are taken of long rows.
    grouped = num_groups * _GROUP
    maxima = logits[:, :grouped].unflatten(1, (_GROUP, num_groups)).amax(dim=1)
    groups = torch.topk(maxima, width, dim=1, sorted=False).indices
    members = torch.arange(0, grouped, num_groups, device=logits.device)
    rest = torch.arange(grouped, logits.shape[1], device=logits.device).expand(len(logits), -1)
    candidates = torch.cat(((groups[:, :, None] + members).flatten(1), rest), dim=1)
    best = torch.topk(logits.gather(1, candidates), width, dim=1, sorted=False).indices
    return candidates.gather(1, best)


def draw(logits: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    """One token id per row, int64. `logits` float32 `[num_rows, vocabulary]`: no NaN, and each row's best is finite."""
    num_tokens = logits.shape[1]
    has_top_k = rows.top_k < num_tokens
    by_rank = has_top_k | (rows.top_p < 1.0)
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for is_drawn, draw_rows in ((has_top_k, _draw_top_k), (~has_top_k & by_rank, _draw_top_p), (~by_rank, _draw_by_id)):
        places = torch.nonzero(is_drawn).squeeze(1)
        if places.numel() == len(logits):
            return draw_rows(logits, rows)
        if places.numel():
            token_ids[places] = draw_rows(logits[places], rows.select(places))
    return token_ids


def _softmax(logits: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    scaled = (logits - logits.amax(dim=1, keepdim=True)).div_(rows.temperature[:, None])
    return torch.softmax(scaled, dim=1)


def _draw_top_k(logits: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    """Rows with top-k: what it leaves is the whole, so that only ranked tokens need a weight."""
    return _draw_ranked(logits, None, rows)


def _draw_top_p(logits: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    """Rows with top-p alone: the whole is the sum over the vocabulary, which softmax makes 1."""
    return _draw_ranked(logits, _softmax(logits, rows), rows)


def _draw_ranked(logits: torch.Tensor, weights: torch.Tensor | None, rows: DrawRows) -> torch.Tensor:
    """Ranks more and more of the best tokens until all that a row keeps is among them."""
    num_tokens = logits.shape[1]
    token_ids, complete = _draw_by_rank(logits, weights, rows, width=min(WIDTHS[0], num_tokens))
    left = torch.nonzero(~complete).squeeze(1)
    for width in (*WIDTHS[1:], num_tokens):
        if not left.numel():
            break
        drawn, complete = _draw_by_rank(
            logits[left], None if weights is None else weights[left], rows.select(left), width=min(width, num_tokens)
        )
        token_ids[left[complete]] = drawn[complete]
        left = left[~complete]
    return token_ids


def _draw_by_id(logits: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    """Rows with neither top-k nor top-p: no ranking. In the order of the ids, find the run, then the token in it."""
    weights = _softmax(logits, rows)
    if bool((rows.min_p > 0.0).any()):
        threshold = rows.min_p[:, None] * weights.amax(dim=1, keepdim=True)
        weights = weights.masked_fill(weights < threshold, 0.0)
    num_missing = -weights.shape[1] % _RUN
    padded = torch.nn.functional.pad(weights, (0, num_missing)) if num_missing else weights
    runs = padded.unflatten(1, (-1, _RUN))
    cumulative = runs.sum(dim=2).cumsum(dim=1, dtype=torch.float64)
    target = _clamp_below(rows.uniform * cumulative[:, -1], cumulative[:, -1])
    run = torch.searchsorted(cumulative, target[:, None], right=True)
    before = torch.nn.functional.pad(cumulative, (1, 0)).gather(1, run).squeeze(1)
    inner = runs.gather(1, run[:, :, None].expand(-1, -1, _RUN)).squeeze(1).cumsum(dim=1, dtype=torch.float64)
    place = torch.searchsorted(inner, _clamp_below(target - before, inner[:, -1])[:, None], right=True)
    return (run * _RUN + place).squeeze(1)


def _draw_by_rank(
    logits: torch.Tensor, weights: torch.Tensor | None, rows: DrawRows, *, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with top-k (no `weights`) or top-p alone (`weights` of all tokens, whose sum is 1), from their `width` best
    tokens; also whether those hold all that a row keeps."""
    num_tokens = logits.shape[1]
    ids, num_exact = _rank(logits, width)
    # Where a grammar leaves a few tokens, all behind them has no weight.
    is_all = logits.gather(1, ids[:, -1:]).squeeze(1) == -torch.inf
    if weights is None:
        best = logits.gather(1, ids)
        ranked = torch.exp((best - best[:, :1]).div_(rows.temperature[:, None]))
    else:
        ranked = weights.gather(1, ids)
    cumulative = ranked.cumsum(dim=1, dtype=torch.float64)
    has_top_k = weights is None
    within = rows.top_k.clamp(max=width)
    whole = cumulative.gather(1, within[:, None] - 1).squeeze(1) if has_top_k else torch.ones_like(rows.top_p)
    shortest = torch.searchsorted(cumulative, (rows.top_p * whole)[:, None]).squeeze(1) + 1
    by_top_p = torch.where(rows.top_p < 1.0, shortest, num_tokens)
    by_min_p = (ranked >= rows.min_p[:, None] * ranked[:, :1]).sum(dim=1)
    complete = is_all | ((rows.top_k if has_top_k else by_top_p) <= num_exact)
    if width == num_tokens:
        complete = torch.ones_like(complete)
    kept = torch.minimum(torch.minimum(within, by_top_p), by_min_p)
    total = cumulative.gather(1, kept[:, None] - 1).squeeze(1)
    place = torch.searchsorted(cumulative, _clamp_below(rows.uniform * total, total)[:, None], right=True)
    return ids.gather(1, place.clamp(max=width - 1)).squeeze(1), complete


def _clamp_below(target: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Keep a target under its total, which a product may round up to: then the first place above it has weight."""
    return torch.minimum(target.clamp(min=0.0), torch.nextafter(total, torch.zeros_like(total)))
