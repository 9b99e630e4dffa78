"""Ask: from a question to an answer. Shift, select, refresh, question, decode, keep."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvedit.cache.kv import States
from kvedit.cache.memory import check_memory
from kvedit.cache.rows import RowTable
from kvedit.errors import UsageError
from kvedit.model.decode import Lookup, Sampler, TextStream, decode_, prefill_question_
from kvedit.model.model import CHUNK_ROWS
from kvedit.names import DEFAULT_NEW_TOKENS
from kvedit.policies.evidence import Past
from kvedit.repair.options import Options
from kvedit.repair.pipeline import Repair, Selection
from kvedit.repair.reports import Answer, ChosenUnit, Explanation, Token
from kvedit.session.state import State
from kvedit.timing import Timings, waiter
from kvedit.tokens.prompt import check_context

IntArray = npt.NDArray[np.int64]


class Answering(Iterator[Token]):
    """An answer in progress: an iterator of tokens.

    Args:
        tokens: Yields the tokens and returns the answer.
    """

    def __init__(self, tokens: Generator[Token, None, Answer]) -> None:
        self._tokens = tokens
        self._answer: Answer | None = None
        self._interrupted = False

    def __next__(self) -> Token:
        try:
            if self._interrupted:
                self._interrupted = False
                return self._tokens.throw(KeyboardInterrupt())
            return next(self._tokens)
        except StopIteration as end:
            if end.value is not None:
                self._answer = end.value
            raise

    @property
    def answer(self) -> Answer:
        """The complete answer with counts and timings; raises `UsageError` before the last token."""
        if self._answer is None:
            raise UsageError("The answer is not complete.", "Iterate over all its tokens first.")
        return self._answer

    def interrupt(self) -> None:
        """End the answer after the last token taken; what was computed is kept."""
        self._interrupted = True

    def close(self) -> None:
        """Stop at once and keep nothing."""
        self._tokens.close()


class Asking:
    """One question to one session.

    Args:
        session: The session; with `keep`, the caller holds its lock.
        options: How to answer.
        timings: Records the phases.
        on_phase: Called with the name of each phase as it begins.
    """

    def __init__(
        self, session: State, options: Options, timings: Timings, on_phase: Callable[[str], None]
    ) -> None:
        self.session, self.options = session, options
        self.model = session.model
        self.timings = timings
        self.timings.synchronize = waiter(self.model.device.type)
        self.on_phase = on_phase
        # Without --continue, a question does not see the conversation.
        self.rows: RowTable = (
            session.rows if options.conversation else session.rows.first(session.document_rows)
        )
        self.ids = session.ids[: len(self.rows)]

    def tokens(self, question: str) -> Generator[Token, None, Answer]:
        """Answer, token by token; see `Session.ask`."""
        options, timings, total = self.options, self.timings, len(self.rows)
        question_ids = self.question_ids(question)
        limit = self._limit(len(question_ids))
        suffix, replay_s = int(self.rows.suffix.sum()), self.session.replay_s
        budget_rows = options.budget.resolve(suffix)
        if options.decode_weights is not None:
            with timings.measure("load"):
                self.model.reduced(options.decode_weights)
        self.shift(total + len(question_ids) + limit, budget_rows + int(self.rows.missing.sum()))
        repair = self.repair(question)
        selection = repair.select(options)
        executor, parts = repair.refresh(selection.computed, options.executor)
        logits, states = repair.question(question_ids)
        lookup = Lookup(np.concatenate([self.ids, question_ids]), limit)
        answer_ids, text, reason, walked = yield from self._decode(logits, limit, lookup)
        kept = options.keep and (bool(parts) or options.conversation)
        if options.conversation and options.decode_weights is not None and walked:
            with timings.measure("save"):  # kept rows come from the model's own weights
                walked = [self._answer_states(total + len(question_ids), answer_ids[: len(walked)])]
        if kept:
            self.on_phase("save")
            with timings.measure("save", len(selection.computed)):
                if reason == "interrupted" and answer_ids:  # a replay must end at the same token
                    options = replace(options, max_new_tokens=len(answer_ids))
                new_ids = [*question_ids.tolist(), *answer_ids]
                self._keep(options.command(question), parts, [states, *walked], new_ids)
        return Answer(
            text=text,
            ids=tuple(answer_ids),
            finish_reason=reason,
            options=self.options,
            executor=executor,
            budget_rows=budget_rows,
            suffix=suffix,
            missing=len(selection.missing),
            refreshed=len(selection.rows),
            reused=total - len(selection.computed),
            runs=selection.runs,
            tokens=total,
            timings=timings,
            first_token_s=timings.seconds("shift", "selection", "refresh", "question"),
            replay_s=replay_s,
            kept=kept,
        )

    def explain(self, question: str) -> Explanation:
        """Return what a question would refresh, and why. Changes nothing."""
        session, rows = self.session, self.rows
        total, suffix = len(rows), int(rows.suffix.sum())
        self._limit(len(self.question_ids(question)))  # refuse a question that would not fit
        self.shift(total + len(session.tokenizer.encode_text(question)))  # and capacity for a probe
        selection = self.repair(question).select(self.options)
        return Explanation(
            policy=self.options.policy,
            budget=self.options.budget.text,
            budget_rows=self.options.budget.resolve(suffix),
            suffix=suffix,
            missing=len(selection.missing),
            tokens=total,
            runs=selection.runs,
            refresh_s=len(selection.computed) / session.manifest.prefill_tokens_per_s,
            replay_s=session.replay_s,
            units=tuple(self._chosen_units(selection)),
            lines=self._chosen_lines(selection.rows),
        )

    def shift(self, capacity: int, computed: int = 0) -> None:
        """Load the session's rows into the working cache, and reserve `capacity` rows.

        Raises:
            KveditError: The cache and the `computed` rows held meanwhile do not fit into memory.
        """
        self.on_phase("shift")
        session, rows, model = self.session, self.rows, self.model
        working = session.working
        computed_bytes = model.walk_bytes(computed) + 2 * model.cache_bytes(computed)
        what = f"A question about {len(rows):,} tokens ({computed:,} to compute)"
        check_memory(what, working.wanting(capacity) + computed_bytes, model.device)
        with self.timings.measure("load"):
            session.read_segments()
        with self.timings.measure("shift"):
            working.reserve(capacity)
            gathered = sum(session.segments.gather(session.working, rows, working.differing(rows)))
        self.timings.add("shift", 0.0, gathered)

    def repair(self, question: str) -> Repair:
        """Return the pipeline for a question on the working cache, after `shift`."""
        working = self.session.working
        return Repair(
            model=self.model,
            cache=working.cache,
            ids=self.ids,
            rows=self.rows,
            unit=self.session.units[: len(self.rows)],
            query_ids=self.session.tokenizer.encode_text(question).ids,
            past=self._past,
            timings=self.timings,
            on_phase=self.on_phase,
            on_write=working.forget,
        )

    def _past(self) -> Past | None:
        """Return the last earlier revision whose rows were all exact, and which of them remain."""
        exact = self.session.exact_past()
        if exact is None:
            return None
        read_ids, rows = exact
        return Past(read_ids, self.rows.found_in(rows), partial(self.session.segments.find_ids, rows))

    def question_ids(self, question: str) -> IntArray:
        """Return the ids of a question with the prompt around it, `int64 [N]`."""
        session = self.session
        next_turn = self.options.conversation and bool(session.revision.turns)
        return session.prompt.question_ids(session.tokenizer, question, next_turn=next_turn)

    def _limit(self, question: int) -> int:
        """Return the answer's maximum length in ids; raise `ContextError` if it does not fit."""
        tokens, context, limit = len(self.rows), self.model.context_length, self.options.max_new_tokens
        if limit is None:
            check_context(tokens, question + 1, "the question with one token of answer", context)
            return min(DEFAULT_NEW_TOKENS, context - tokens - question)
        check_context(tokens, question + limit, "question and answer", context)
        return limit

    def _answer_states(self, start: int, ids: list[int]) -> States:
        """Recompute the states of an answer's ids with the model's own weights."""
        cache = self.session.working.cache
        cache.length = start
        return prefill_question_(self.model, cache, self.model.to_device(np.array(ids, dtype=np.int64)))[1]

    def _decode(
        self, logits: Tensor, limit: int, lookup: Lookup
    ) -> Generator[Token, None, tuple[list[int], str, str, list[States]]]:
        """Stream the answer; an interrupt ends it and keeps what was decoded."""
        self.on_phase("decode")
        options = self.options
        stream, ids, texts = TextStream(self.session.tokenizer), list[int](), list[str]()
        walked: list[States] = []
        sampler = Sampler(options.temperature, options.seed)
        model = self.model.reduced(options.decode_weights)
        answer = decode_(model, self.session.working.cache, logits, sampler, limit, walked, lookup)
        reason = "stop"
        try:
            while True:
                with self.timings.measure("decode"):  # exclude the caller's time between tokens
                    token = next(answer, None)
                if token is None:
                    break
                ids.append(token)
                texts.append(stream.push(token))
                yield Token(token, texts[-1])
            if len(ids) == limit:
                reason = "length"
        except KeyboardInterrupt:
            reason = "interrupted"
        if rest := stream.finish():
            texts.append(rest)
            yield Token(None, rest)
        self.timings.add("decode", 0.0, len(ids))
        return ids, "".join(texts), reason, walked

    def _keep(self, command: str, parts: list[States], conversation: list[States], ids: list[int]) -> None:
        """Keep refreshed rows and, in a conversation, the rows of question and answer."""
        session = self.session
        parts = States.merged(parts, CHUNK_ROWS)
        turns = None
        if self.options.conversation:
            parts.append(States.concatenate(conversation))
            turns = (*session.revision.turns, *ids)
        session.keep(parts, command, turns)
        row_ids = np.concatenate([states.rows.cpu().numpy() for states in parts])
        session.working.settle(session.rows, np.sort(row_ids))

    def _chosen_units(self, selection: Selection) -> list[ChosenUnit]:
        """Return the units with selected rows, best first."""
        if selection.scores is None:
            return []
        session, evidence, scores = self.session, selection.evidence, selection.scores
        head, text = len(session.manifest.head_ids), session.document.text
        own = evidence.unit if scores.unit is None else scores.unit
        units: list[ChosenUnit] = []
        for unit in np.unique(evidence.unit[selection.rows]):
            rows = np.flatnonzero(evidence.unit == unit)
            first = last = 0
            content = session.tokenizer.decode(self.ids[rows].tolist())
            if rows[0] < session.document_rows:
                start = int(session.tokens.starts[rows[0] - head])
                stop = int(session.tokens.stops[rows[-1] - head])
                content = text[start:stop]
                begins = start + len(content) - len(content.lstrip())
                first, last = (text.count("\n", 0, offset) + 1 for offset in (begins, max(start, stop - 1)))
            chosen = int(np.isin(rows, selection.rows).sum())
            score = float(scores.units[own[rows]].max())
            units.append(ChosenUnit(first, last, content, score, chosen, len(rows)))
        return sorted(units, key=lambda item: -item.score)

    def _chosen_lines(self, selected: IntArray) -> tuple[float, ...]:
        """Return the selected share of each line's rows."""
        session = self.session
        body = selected[selected < session.document_rows] - len(session.manifest.head_ids)
        starts, count = np.array(session.document.line_starts, dtype=np.int64), session.document.line_count
        # A row belongs to the line where it ends: it may begin with a space of the line before.
        line = np.searchsorted(starts, np.maximum(session.tokens.stops - 1, 0), side="right") - 1
        rows = np.bincount(line, minlength=count)
        return tuple((np.bincount(line[body], minlength=count) / np.maximum(rows, 1)).tolist())
