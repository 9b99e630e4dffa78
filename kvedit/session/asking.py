"""Ask: the steps from a question to an answer. Shift, select, refresh, question, decode, keep."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvedit.cache.kv import States
from kvedit.cache.memory import check_memory
from kvedit.cache.rows import RowTable, runs
from kvedit.errors import UsageError
from kvedit.model.decode import Lookup, Sampler, TextStream, decode_, prefill_question_
from kvedit.model.model import CHUNK_ROWS
from kvedit.names import DEFAULT_NEW_TOKENS
from kvedit.policies.evidence import Evidence, Past
from kvedit.policies.registry import policy_named
from kvedit.policies.scores import Scores
from kvedit.repair.options import Options
from kvedit.repair.refresh import choose_executor, refresh_
from kvedit.repair.reports import Answer, ChosenUnit, Explanation, Token
from kvedit.repair.select import select
from kvedit.session.state import State
from kvedit.text.units import UNIT_CAP, unit_of_rows
from kvedit.timing import Timings, waiter
from kvedit.tokens.prompt import check_context

IntArray = npt.NDArray[np.int64]


class Answering(Iterator[Token]):
    """An answer as it comes: an iterator of tokens.

    Args:
        tokens: Gives the tokens; its value is the answer.
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
        """The whole answer with its counts and timings; raises `UsageError` before the last token."""
        if self._answer is None:
            raise UsageError("The answer has not come to its end.", "Take the tokens to the last one first.")
        return self._answer

    def interrupt(self) -> None:
        """End the answer with the token that was taken last; what was computed is kept."""
        self._interrupted = True

    def close(self) -> None:
        """End at once, and keep nothing."""
        self._tokens.close()


class Asking:
    """One question to one session.

    Args:
        session: Asked; with `keep` the caller holds its lock.
        options: How.
        timings: Gets the phases.
        on_phase: Gets the name of each phase as it begins.
    """

    def __init__(
        self, session: State, options: Options, timings: Timings, on_phase: Callable[[str], None]
    ) -> None:
        self.policy = policy_named(options.policy)
        self.session, self.options = session, options
        self.model = session.model
        self.timings = timings
        self.timings.synchronize = waiter(self.model.device.type)
        self.on_phase = on_phase
        # A question asked alone does not see the conversation.
        self.rows: RowTable = (
            session.rows if options.conversation else session.rows.first(session.document_rows)
        )
        self.ids = session.ids[: len(self.rows)]

    def tokens(self, question: str) -> Generator[Token, None, Answer]:
        """Answer, token by token; see `Session.ask`."""
        session, options, timings, rows = self.session, self.options, self.timings, self.rows
        question_ids = self._question_ids(question)
        limit = self._limit(len(question_ids))
        total, suffix, replay_s = len(rows), int(rows.suffix.sum()), session.replay_s

        budget_rows = options.budget.resolve(suffix)
        if options.decode_weights is not None:
            with timings.measure("load"):
                self.model.reduced(options.decode_weights)
        self.shift(total + len(question_ids) + limit, budget_rows + int(rows.missing.sum()))
        support, _, _ = self.select(question, budget_rows)
        missing = np.flatnonzero(rows.missing)
        computed = np.union1d(support, missing)
        executor, parts = self._refresh(computed)
        self.on_phase("question")
        working = session.working
        working.forget(np.arange(total, working.cache.capacity))
        with timings.measure("question", len(question_ids)):
            ids = self.model.to_device(question_ids)
            logits, states = prefill_question_(self.model, working.cache, ids)
        lookup = Lookup(np.concatenate([self.ids, question_ids]), limit)
        said, text, reason, walked = yield from self._decode(logits, limit, lookup)
        if options.conversation and options.decode_weights is not None and walked:
            with timings.measure("save"):  # what is kept is computed with the model's own weights
                working.cache.length = total + len(question_ids)
                ids = self.model.to_device(np.array(said[: len(walked)], dtype=np.int64))
                walked = [prefill_question_(self.model, working.cache, ids)[1]]
        kept = options.keep and (bool(parts) or options.conversation)
        if kept:
            self.on_phase("save")
            with timings.measure("save", len(computed)):
                if reason == "interrupted" and said:  # asked again, it is to end there
                    options = replace(options, max_new_tokens=len(said))
                command = options.command(question)
                self._keep(command, parts, [states, *walked], [*question_ids.tolist(), *said])
        return Answer(
            text=text,
            ids=tuple(said),
            finish_reason=reason,
            policy=options.policy,
            executor=executor,
            seed=options.seed,
            temperature=options.temperature,
            budget=options.budget.text,
            budget_rows=budget_rows,
            suffix=suffix,
            missing=len(missing),
            refreshed=len(support),
            reused=total - len(computed),
            runs=sum(1 for _ in runs(computed)),
            tokens=total,
            timings=timings,
            first_token_s=timings.seconds("shift", "selection", "refresh", "question"),
            replay_s=replay_s,
            kept=kept,
        )

    def explain(self, question: str) -> Explanation:
        """Say what would be refreshed for a question, and why. Changes nothing."""
        session, rows = self.session, self.rows
        total, suffix = len(rows), int(rows.suffix.sum())
        self._limit(len(self._question_ids(question)))  # what cannot be asked is not explained
        self.shift(total + len(session.tokenizer.encode_text(question)))  # with room for a probe
        budget_rows = self.options.budget.resolve(suffix)
        support, evidence, scores = self.select(question, budget_rows)
        missing = np.flatnonzero(rows.missing)
        computed = np.union1d(support, missing)
        speed = session.manifest.prefill_tokens_per_s
        return Explanation(
            policy=self.options.policy,
            budget=self.options.budget.text,
            budget_rows=budget_rows,
            suffix=suffix,
            missing=len(missing),
            tokens=total,
            runs=sum(1 for _ in runs(computed)),
            refresh_s=len(computed) / speed,
            replay_s=session.replay_s,
            units=tuple(self._chosen_units(support, evidence, scores)) if scores else (),
            lines=self._chosen_lines(support),
        )

    def shift(self, capacity: int, computed: int = 0) -> None:
        """Bring the session's rows into the working cache, with room for `capacity` rows.

        Raises:
            KveditError: That, or the `computed` rows that will be in hand, does not fit into memory.
        """
        self.on_phase("shift")
        session, rows, model = self.session, self.rows, self.model
        working = session.working
        in_hand = model.walk_bytes(computed) + 2 * model.cache_bytes(computed)
        what = f"A question to {len(rows):,} tokens, with {computed:,} to compute,"
        check_memory(what, working.wanting(capacity) + in_hand, model.device)
        session.read_segments()
        with self.timings.measure("shift"):
            working.reserve(capacity)
            gathered = sum(session.gather(rows, working.differing(rows)))
        self.timings.add("shift", 0.0, gathered)

    def select(self, question: str, budget: int) -> tuple[IntArray, Evidence, Scores | None]:
        """Choose the support for a question; nothing is scored where nothing can be bought."""
        rows = self.rows
        if budget and self.policy.reads_cache:
            self._refresh(np.flatnonzero(rows.missing))
        self.on_phase("selection")
        with self.timings.measure("selection", int(rows.suffix.sum())):
            unit = self._units()
            evidence = Evidence(
                model=self.model,
                cache=self.session.working.cache,
                ids=self.ids,
                unit=unit,
                units=int(unit.max(initial=-1)) + 1,
                query_ids=self.session.tokenizer.encode_text(question).ids,
                suffix=rows.suffix,
                seed=self.options.seed,
                past=self._past() if budget else None,
            )
            if not budget:
                return np.zeros(0, dtype=np.int64), evidence, None
            scores = self.policy.score(evidence)
            support_of = self.options.support or self.policy.support
            support = select(scores, unit, rows.stale, rows.suffix, budget, support_of)
            return support, evidence, scores

    def _past(self) -> Past | None:
        """Find the last revision before this one whose rows were all exact, and which of them are left."""
        journal, entry = self.session.journal, self.session.revision.entry
        while entry.parent is not None:
            entry = journal.entry(entry.parent)
            if entry.frontier == entry.tokens:
                ids, rows = self.session.rows_of(entry.number)
                return Past(ids, self.rows.found_in(rows))
        return None

    def _units(self) -> IntArray:
        """Number the unit of each row: -1 for the head; a conversation is cut into equal pieces."""
        session = self.session
        body = unit_of_rows(session.document.text, session.tokens.starts)
        spoken = len(self.rows) - session.document_rows
        after = int(body.max(initial=-1)) + 1 + np.arange(spoken) // UNIT_CAP
        return np.concatenate([np.full(len(session.manifest.head_ids), -1), body, after])

    def _question_ids(self, question: str) -> IntArray:
        session = self.session
        next_turn = self.options.conversation and bool(session.revision.turns)
        return session.prompt.question_ids(session.tokenizer, question, next_turn=next_turn)

    def _limit(self, question: int) -> int:
        """Say how many ids the answer may have, or refuse."""
        tokens, context, limit = len(self.rows), self.model.context_length, self.options.max_new_tokens
        if limit is None:
            check_context(tokens, question + 1, "the question with one token of answer", context)
            return min(DEFAULT_NEW_TOKENS, context - tokens - question)
        check_context(tokens, question + limit, "question and answer", context)
        return limit

    def _refresh(self, computed: IntArray) -> tuple[str, list[States]]:
        self.on_phase("refresh")
        if not len(computed):
            self.timings.add("refresh", 0.0, 0)
            return "none", []
        executor = choose_executor(self.options.executor, computed)
        ids, working = self.model.to_device(self.ids), self.session.working
        working.forget(computed)  # until they are kept
        with self.timings.measure("refresh", len(computed)):
            return executor, list(refresh_(self.model, working.cache, ids, computed, executor))

    def _decode(
        self, logits: Tensor, limit: int, lookup: Lookup
    ) -> Generator[Token, None, tuple[list[int], str, str, list[States]]]:
        """Stream the answer; an interrupt ends it and keeps what was said."""
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
                with self.timings.measure("decode"):  # not the time of whoever reads the tokens
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

    def _keep(self, command: str, parts: list[States], spoken: list[States], ids: list[int]) -> None:
        """Keep refreshed rows and, in a conversation, those of question and answer."""
        session = self.session
        parts = States.merged(parts, CHUNK_ROWS)
        turns = None
        if self.options.conversation:
            parts.append(States.concatenate(spoken))
            turns = (*session.revision.turns, *ids)
        session.keep(parts, command, turns)
        place = np.concatenate([states.rows.cpu().numpy() for states in parts])
        session.working.settle(session.rows, np.sort(place))

    def _chosen_units(self, support: IntArray, evidence: Evidence, scores: Scores) -> list[ChosenUnit]:
        session = self.session
        head, text = len(session.manifest.head_ids), session.document.text
        own = evidence.unit if scores.unit is None else scores.unit
        found: list[ChosenUnit] = []
        for unit in np.unique(evidence.unit[support]):
            rows = np.flatnonzero(evidence.unit == unit)
            first = last = 0
            spelled = session.tokenizer.decode(self.ids[rows].tolist())
            if rows[0] < session.document_rows:
                start = int(session.tokens.starts[rows[0] - head])
                stop = int(session.tokens.stops[rows[-1] - head])
                spelled = text[start:stop]
                content = start + len(spelled) - len(spelled.lstrip())
                first, last = (text.count("\n", 0, at) + 1 for at in (content, max(start, stop - 1)))
            chosen = int(np.isin(rows, support).sum())
            score = float(scores.units[own[rows]].max())
            found.append(ChosenUnit(first, last, spelled, score, chosen, len(rows)))
        return sorted(found, key=lambda item: -item.score)

    def _chosen_lines(self, support: IntArray) -> tuple[float, ...]:
        """Share of the rows of each line that is in the support."""
        session = self.session
        body = support[support < session.document_rows] - len(session.manifest.head_ids)
        starts, count = np.array(session.document.line_starts, dtype=np.int64), session.document.line_count
        # A row belongs to the line in which it ends: a blank before a word may be of the line before.
        line = np.searchsorted(starts, np.maximum(session.tokens.stops - 1, 0), side="right") - 1
        held = np.bincount(line, minlength=count)
        return tuple((np.bincount(line[body], minlength=count) / np.maximum(held, 1)).tolist())
