"""Which tokens each row may take next, where its completion must fit a grammar.

What a row may take depends on the token just sampled. It is worked out on other threads from that moment on, while the next step is
scheduled and the model runs, and is waited for only when that step is sampled. Rows that choose among labels share what is known of each
beginning of a label; other grammars have too many states for rows to meet in, but all of them begin in the same one.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Sequence
from dataclasses import dataclass

import llguidance
import llguidance.numpy
import numpy as np

from batchllm.engine.grammar_tokens import GrammarVocabulary, grammar_tokens
from batchllm.engine.sampling import AllowedTokens
from batchllm.prompt import Grammar

_MOST_SHARED = 1 << 14
"""States that rows share, over all grammars. Beyond them a row has its own; a grammar for each row must not fill the memory."""


@dataclass(slots=True, eq=False)
class _State:
    """Where a grammar stands after some tokens. `children`: by token, the states that follow, where this one is shared by rows; one that is a
    row's own hands its matcher on.

    `ids`: the tokens it takes, or where `is_open` all that it does not take; None until `is_asked` and worked out. `forced`: the tokens that
    must come next, one after the other, where it takes one only.
    """

    matcher: llguidance.LLMatcher
    children: dict[int, _State] | None
    is_complete: bool = False
    is_asked: bool = False
    is_open: bool = False
    ids: np.ndarray | None = None
    forced: tuple[int, ...] = ()
    failure: str | None = None


class GrammarMasks:
    """The grammars of the running rows, by slot (as in `Sampler`), and what they allow. Owns its threads until `close`.

    A row's state is a function of its grammar and its tokens so far, so a preempted row is simply added again. Costs
    nothing until a row with a grammar is added.
    """

    def __init__(
        self,
        *,
        vocabulary: GrammarVocabulary,
        vocab_size: int,
        max_sequences: int,
        tokens: llguidance.LLTokenizer | None = None,
    ) -> None:
        """`vocab_size`: of the model's logits, which may exceed the tokenizer's. `tokens`: of `grammar_tokens`, made when needed where None."""
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._tokens = tokens
        self._has_grammar = np.zeros(max_sequences, dtype=bool)
        self._states: dict[int, _State] = {}
        self._roots: dict[Grammar, _State] = {}
        self._num_shared = 0
        self._is_choice = np.zeros(max_sequences, dtype=bool)
        self._workers: llguidance.LLExecutor | None = None
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: list[concurrent.futures.Future[None]] = []

    def add(self, slot: int, grammar: Grammar, *, output_ids: Sequence[int]) -> None:
        """Start a row in a free slot. After a preemption `output_ids` are the tokens it has generated already."""
        assert not self._has_grammar[slot], f"slot {slot} is in use"
        self._has_grammar[slot] = True
        self._is_choice[slot] = grammar.kind == "choice"
        self._states[slot] = self._root(grammar)
        if output_ids:
            self._wait()
        for token_id in output_ids:
            self._advance(slot, token_id)
        self.prepare(np.array([slot]))

    def remove(self, slot: int) -> None:
        """Free a slot, whether or not its row has a grammar."""
        if self._has_grammar[slot]:
            self._has_grammar[slot] = False
            del self._states[slot]

    @property
    def any_running(self) -> bool:
        """Whether a running row has a grammar."""
        return bool(self._states)

    def allowed(self, slots: np.ndarray) -> AllowedTokens | None:
        """What the rows in `slots` may take, waiting for what is under way. None where no row has a grammar."""
        rows = np.flatnonzero(self._has_grammar[slots])
        if not len(rows):
            return None
        self._wait()
        states = [self._states[slot] for slot in slots[rows].tolist()]
        ids = [state.ids for state in states if state.ids is not None]
        assert len(ids) == len(states), "a state that nobody asked for"
        return AllowedTokens(rows=rows, ids=ids, is_open=np.array([state.is_open for state in states]))

    def forced(self, slots: np.ndarray, *, wait: bool) -> np.ndarray:
        """int64 `[num_rows]`: the only token that a row may take, -1 where it may take several, or none.

        Without `wait` only what is known already is told: in states that rows share, and after a token that was forced itself.
        """
        token_ids = np.full(len(slots), -1, dtype=np.int64)
        rows = np.flatnonzero(self._has_grammar[slots])
        if len(rows) and wait:
            self._wait()
        for row in rows.tolist():
            forced = self._states[int(slots[row])].forced
            if forced:
                token_ids[row] = forced[0]
        return token_ids

    def accept(self, slots: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """Takes the token just sampled for each of the distinct `slots`; bool `[num_rows]`: rows that are complete.

        A row is complete when its grammar takes nothing more. One that may end or go on is not; an EOS ends it.
        """
        complete = np.zeros(len(slots), dtype=bool)
        rows = np.flatnonzero(self._has_grammar[slots])
        # Of a token that was forced more is known than the masks that are under way.
        if any(self._states[slot].ids is None for slot in slots[rows].tolist()):
            self._wait()
        for row in rows.tolist():
            complete[row] = self._advance(int(slots[row]), int(token_ids[row])).is_complete
        return complete

    def prepare(self, slots: np.ndarray) -> None:
        """Begins to work out what those of `slots` that have a grammar may take next; returns at once."""
        if self._states:
            states = [self._states[slot] for slot in slots[self._has_grammar[slots]].tolist()]
            self._ask([state for state in states if not state.is_asked])

    def failure(self, slot: int) -> str | None:
        """Why the grammar of a row could not go on, if so; it then allows nothing."""
        return self._states[slot].failure if self._has_grammar[slot] else None

    def close(self) -> None:
        """Ends the threads."""
        if self._thread is not None:
            self._thread.shutdown()

    def _root(self, grammar: Grammar) -> _State:
        root = self._roots.get(grammar)
        if root is None:
            if self._num_shared >= _MOST_SHARED:
                # Running rows keep what they stand in.
                self._roots, self._num_shared = {}, 0
            if self._tokens is None:
                self._tokens = grammar_tokens(self._vocabulary, vocab_size=self._vocab_size)
            root = _State(llguidance.LLMatcher(self._tokens, grammar.text, log_level=0), children={})
            self._roots[grammar] = root
            self._num_shared += 1
        return root

    def _advance(self, slot: int, token_id: int) -> _State:
        """The row's state after a token."""
        state = self._states[slot]
        child = None if state.children is None else state.children.get(token_id)
        if child is None:
            child = self._follow(state, token_id, is_shared=bool(self._is_choice[slot]))
        self._states[slot] = child
        return child

    def _follow(self, state: _State, token_id: int, *, is_shared: bool) -> _State:
        matcher = state.matcher if state.children is None else state.matcher.deep_copy()
        matcher.consume_token(token_id)
        child = _State(matcher, children=None, is_complete=matcher.is_stopped() and not matcher.is_error())
        if state.forced[:1] == (token_id,) and len(state.forced) > 1:
            child.is_asked = True
            child.forced = state.forced[1:]
            child.ids = np.array(child.forced[:1])
        if state.children is not None and is_shared and self._num_shared < _MOST_SHARED:
            self._num_shared += 1
            child.children = {}
            state.children[token_id] = child
        return child

    def _ask(self, states: list[_State]) -> None:
        asked: list[_State] = []
        for state in states:
            if not state.is_asked:  # two rows may stand in it
                state.is_asked = True
                asked.append(state)
        if asked:
            if self._thread is None:
                self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
            self._pending.append(self._thread.submit(self._work_out, asked))

    def _work_out(self, states: list[_State]) -> None:
        bits = np.empty((len(states), -(-self._vocab_size // 32)), dtype=np.int32)
        if self._workers is None:
            # The model needs the cores more: masks of 100 rows are a few milliseconds on one.
            self._workers = llguidance.LLExecutor(max(1, (os.cpu_count() or 1) // 4))
        numbered = [(state.matcher, number) for number, state in enumerate(states)]
        llguidance.numpy.fill_next_token_bitmask_par(self._workers, numbered, bits)
        for state, words in zip(states, bits, strict=True):
            if state.matcher.is_error():
                # In error the library allows EOS, which would pass a broken text for a whole one.
                words[:] = 0
                state.failure = f"the output's grammar failed: {state.matcher.get_error().splitlines()[0]}"
            self._note(state, words)

    def _note(self, state: _State, words: np.ndarray) -> None:
        state.is_open = 2 * int(np.count_nonzero(words == -1)) > words.size
        ids = _set_bits(~words if state.is_open else words)
        ids = ids[ids < self._vocab_size]
        if ids.size == 1 and not state.is_open:
            forced = tuple(state.matcher.compute_ff_tokens())
            state.forced = forced if forced[:1] == (ids[0],) else (int(ids[0]),)
        # Last: with it the matcher is the other thread's again.
        state.ids = ids

    def _wait(self) -> None:
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()


def _set_bits(words: np.ndarray) -> np.ndarray:
    """int64: the numbers of the bits that are set in `words` int32, where few of the words have any."""
    some = np.flatnonzero(words)
    bits = np.unpackbits(words[some].view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    word, bit = np.nonzero(bits)
    return some[word] * 32 + bit
