"""Drawing one token per row from filtered logits: temperature, then top-k, top-p and min-p, each row as if alone.

Tokens are ranked by (logit descending, id ascending). In that order every filter keeps a prefix, so the kept set is a
length: top-k keeps k; top-p the shortest prefix that holds at least p of what top-k left; min-p those of at least
`min_p` times the best. Ties are broken by id, exactly: `top_k` 1 and a tiny `top_p` are greedy, ties or not.

A row's bits depend on that row alone. So a row is normalised by softmax and summed by `cumsum` in float64, both of
which walk each row by itself, and never by `sum`, which splits a lone row over the threads. Ranking reads the best
`CANDIDATES` tokens first, and the whole row only where the cut lies behind them; both give the same sums, bit for
bit, because a prefix sum does not see what follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

CANDIDATES = 256
"""Tokens that are ranked before the whole row is."""


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
    num_tokens = logits.shape[1]
    bits = (logits.float() + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: -0.0 ranks with 0.0
    ranks = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32
    keys = ranks | torch.arange(num_tokens - 1, -1, -1, device=logits.device)
    if num_ids < num_tokens:
        best = torch.topk(keys, num_ids, dim=1).values
    else:
        best = torch.sort(keys, dim=1, descending=True).values
    return num_tokens - 1 - (best & 0xFFFFFFFF)


def draw(logits: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    """One token id per row, int64. `logits` float32 `[num_rows, vocabulary]`: no NaN, and each row's best is finite."""
    best = logits.amax(dim=1, keepdim=True)
    weights = torch.softmax((logits - best) / rows.temperature[:, None], dim=1)
    ranked = (rows.top_k < logits.shape[1]) | (rows.top_p < 1.0)
    token_ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for is_ranked, draw_some in ((False, _draw_by_id), (True, _draw_ranked)):
        chosen = torch.nonzero(ranked == is_ranked).squeeze(1)
        if chosen.numel() == logits.shape[0]:
            return draw_some(logits, weights, rows)
        if chosen.numel():
            token_ids[chosen] = draw_some(logits[chosen], weights[chosen], rows.select(chosen))
    return token_ids


def _draw_by_id(logits: torch.Tensor, weights: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    """Rows with neither top-k nor top-p: no ranking, the sum runs in the order of the ids."""
    threshold = rows.min_p[:, None] * weights.amax(dim=1, keepdim=True)
    cumulative = weights.masked_fill(weights < threshold, 0.0).cumsum(dim=1, dtype=torch.float64)
    return _first_above(cumulative, total=cumulative[:, -1], uniform=rows.uniform)


def _draw_ranked(logits: torch.Tensor, weights: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    """Rows with top-k or top-p: the best candidates first, then whole rows for those whose cut lies behind them."""
    num_tokens = logits.shape[1]
    if num_tokens <= CANDIDATES:
        return _draw_prefix(logits, weights, rows, num_ids=num_tokens)[0]
    token_ids, complete = _draw_prefix(logits, weights, rows, num_ids=CANDIDATES)
    rest = torch.nonzero(~complete).squeeze(1)
    if rest.numel():
        token_ids[rest] = _draw_prefix(logits[rest], weights[rest], rows.select(rest), num_ids=num_tokens)[0]
    return token_ids


def _draw_prefix(
    logits: torch.Tensor, weights: torch.Tensor, rows: DrawRows, *, num_ids: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among the `num_ids` best tokens; also whether all that a row keeps lies within them (else: do not use)."""
    num_tokens = logits.shape[1]
    ids = leading_ids(logits, num_ids)
    ranked = weights.gather(1, ids)
    cumulative = ranked.cumsum(dim=1, dtype=torch.float64)
    within = rows.top_k.clamp(max=num_ids)
    # Softmax has made the whole row sum to 1; under top-k the whole is what top-k left.
    whole = torch.where(rows.top_k < num_tokens, cumulative.gather(1, within[:, None] - 1).squeeze(1), 1.0)
    wanted = (rows.top_p * whole)[:, None]
    by_top_p = torch.where(rows.top_p < 1.0, torch.searchsorted(cumulative, wanted).squeeze(1) + 1, num_tokens)
    by_min_p = (ranked >= rows.min_p[:, None] * ranked[:, :1]).sum(dim=1)
    complete = (rows.top_k <= num_ids) | ((rows.top_k == num_tokens) & (by_top_p <= num_ids))
    kept = torch.minimum(torch.minimum(within, by_top_p), by_min_p)
    total = cumulative.gather(1, kept[:, None] - 1).squeeze(1)
    place = _first_above(cumulative, total=total, uniform=rows.uniform)
    return ids.gather(1, place[:, None]).squeeze(1), complete


def _first_above(cumulative: torch.Tensor, *, total: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative weights: the first place above `uniform * total`, which never has weight 0."""
    below_total = torch.nextafter(total, torch.zeros_like(total))  # the product may round up to the total itself
    target = torch.minimum(uniform * total, below_total)
    return torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
